# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Several files of a checkout replaced together: all or none, also where the process is interrupted or killed.

New contents are written aside first, where a full disk hurts nobody. A journal in the git folder then says what was
there, files are renamed into place, and the journal goes. Ctrl-C and SIGTERM come before that or after it, an
error is undone at once, and what a killed process has left is undone by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .checkout import Checkout
from .errors import PipelineError


@dataclass(frozen=True)
class Change:
    """What a file holds before and after; None where there is none."""

    path: str
    before: bytes | None
    after: bytes | None


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


def replace_all(checkout: Checkout, changes: Sequence[Change]) -> None:
    """Bring every file from ``before`` to ``after``.

    Raises:
        PipelineError: The disk does not let us; nothing has changed.
    """
    journal = _journal(checkout)
    staged = {change.path: _aside(checkout.folder / change.path) for change in changes if change.after is not None}
    try:
        try:
            for change in changes:
                if change.after is not None:
                    _write(staged[change.path], change.after, like=checkout.folder / change.path)
            _write_journal(journal, changes)
            with _uninterrupted():
                for change in changes:
                    target = checkout.folder / change.path
                    if change.after is None:
                        target.unlink()
                    else:
                        staged[change.path].replace(target)
                _remove(journal)
        except BaseException:
            with _uninterrupted():
                take_back(checkout)
            raise
    except OSError as error:
        raise PipelineError(
            f"{checkout.folder} cannot be written ({error.strerror}: {error.filename}); it is as it was. Look at the "
            "free space and at the permissions of the folder and of its .git"
        ) from error
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: what is done here takes milliseconds, and is done whole."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_back(checkout: Checkout) -> bool:
    """Undo what an interrupted run has left.

    Returns:
        Whether there was anything.

    Raises:
        PipelineError: Files have been edited since.
    """
    journal = _journal(checkout)
    if not journal.is_dir():
        shutil.rmtree(_aside(journal), ignore_errors=True)
        return False
    changes = _read_journal(journal)
    for change in changes:
        if checkout.present(change.path) not in (change.before, change.after):
            raise PipelineError(
                f"an earlier run was interrupted, and {change.path} has been edited since: it cannot be taken back. "
                f"What was there before is in {journal}; put the files in order and delete that folder"
            )
    for change in changes:
        target = checkout.folder / change.path
        if change.before is None:
            target.unlink(missing_ok=True)
        elif checkout.present(change.path) != change.before:
            _write(_aside(target), change.before, like=target)
            _aside(target).replace(target)
        _aside(target).unlink(missing_ok=True)
    _remove(journal)
    return True


def _journal(checkout: Checkout) -> Path:
    return checkout.git_folder / "apex_npu-journal"


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.apex_npu-tmp")


def _write(path: Path, content: bytes, like: Path | None = None) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if like is not None and like.exists():
        shutil.copymode(like, path)


def _write_journal(journal: Path, changes: Sequence[Change]) -> None:
    """Contents first, then the folder's name, by which it counts."""
    aside = _aside(journal)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for number, change in enumerate(changes):
        for side, content in (("before", change.before), ("after", change.after)):
            if content is not None:
                _write(aside / f"{side}-{number}", content)
    _write(aside / "paths.json", json.dumps([change.path for change in changes]).encode())
    aside.rename(journal)


def _read_journal(journal: Path) -> list[Change]:
    def content(side: str, number: int) -> bytes | None:
        path = journal / f"{side}-{number}"
        return path.read_bytes() if path.exists() else None

    paths = json.loads((journal / "paths.json").read_bytes())
    return [Change(path, content("before", number), content("after", number)) for number, path in enumerate(paths)]


def _remove(journal: Path) -> None:
    """The name first, by which it counts."""
    aside = _aside(journal)
    shutil.rmtree(aside, ignore_errors=True)
    journal.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
