# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A quiet end of the process.

torch runs the backward of a device in a thread of its own, which after the last backward still has to drop Python
objects. If the interpreter begins to end just then, the thread is ended in the middle of that, and aborts the process.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_TIMEOUT_S = 2.0


def register() -> None:
    """Let autograd's threads come to rest before the interpreter ends."""
    atexit.register(_wait)


def _wait() -> None:
    if not _TASKS.is_dir():  # not Linux: there is no asking
        time.sleep(0.05)
        return
    deadline = time.monotonic() + _TIMEOUT_S
    at_rest = 0
    while at_rest < 3 and time.monotonic() < deadline:
        states = _autograd_threads()
        if not states:
            return
        at_rest = at_rest + 1 if set(states) == {"S"} else 0
        time.sleep(0.005)  # gives the threads the interpreter's lock


def _autograd_threads() -> list[str]:
    """The kernel's state of each thread of autograd: S, asleep, or R, running or runnable."""
    states = []
    for task in _TASKS.iterdir():
        try:
            if (task / "comm").read_text().startswith("pt_autograd"):
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue  # ended meanwhile
    return states
