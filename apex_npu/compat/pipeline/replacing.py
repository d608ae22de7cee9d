# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``apex_npu.migrate`` needs to write files: a lock on a folder, and signals that wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from .errors import PipelineError
from .files import temporary_name

__all__ = ["alone", "temporary_name", "uninterrupted"]


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes of this kind from ``folder``; the lock goes with the process, however that ends.

    Raises:
        PipelineError: Another one is there.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise PipelineError(f"another process is at work in {folder}: wait for it") from None
    finally:
        os.close(handle)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: what is done here takes milliseconds, and is done whole."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
