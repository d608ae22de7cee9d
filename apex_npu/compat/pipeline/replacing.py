# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Several files of a checkout replaced together: all or none, also where the process is interrupted or killed.

New contents are written to temporary files first, so that a full disk changes no file. A journal in the git folder
then records what was there, the files are renamed into place, and the journal is removed. Ctrl-C and SIGTERM are
handled before or after that, an error is undone at once, and what a killed process left is undone by the next one.
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

from . import files
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
    root, staged = checkout.folder, {change.path: change.after for change in changes if change.after is not None}
    with _writing(root, "it is as it was"):
        try:
            for path, content in staged.items():
                files.write(root, temporary_name(path), content, files.mode(root, path))
            _write_journal(checkout.git_folder, changes)
            with uninterrupted():
                for change in changes:
                    if change.after is None:
                        files.remove(root, change.path)
                    else:
                        files.rename(root, temporary_name(change.path), change.path)
                _remove_journal(checkout.git_folder)
        except BaseException:
            with uninterrupted():
                take_back(checkout, changes)
            raise
        finally:
            for path in staged:
                with contextlib.suppress(OSError):
                    files.remove(root, temporary_name(path))


@contextlib.contextmanager
def _writing(root: Path, then: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PipelineError(
            f"{root} cannot be written ({error.strerror}: {error.filename}); {then}. Look at the free space and at the "
            "permissions of the folder and of its .git"
        ) from error


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: what is done here takes milliseconds, and is done whole."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_back(checkout: Checkout, allowed: Sequence[Change]) -> bool:
    """Undo what an interrupted run has left.

    Args:
        checkout: Whose journal is read. It may be of another origin, as all of the checkout.
        allowed: The files that may be changed, each with its two contents.

    Returns:
        Whether there was anything.

    Raises:
        PipelineError: Files have been edited since, or the journal has others than ``allowed``.
    """
    root, home = checkout.folder, checkout.git_folder
    changes = _read_journal(home, allowed)
    if changes is None:
        shutil.rmtree(home / temporary_name(_JOURNAL), ignore_errors=True)
        return False
    for change in changes:
        if checkout.present(change.path) not in (change.before, change.after):
            raise PipelineError(
                f"an earlier run was interrupted, and {change.path} has been edited since: it cannot be taken back. "
                f"What was there before is in {home / _JOURNAL}; put the files in order and delete that folder"
            )
    with _writing(root, "the next run goes on with what an interrupted one has left"):
        for change in changes:
            if change.before is None:
                files.remove(root, change.path)
            elif checkout.present(change.path) != change.before:
                files.write(root, temporary_name(change.path), change.before, files.mode(root, change.path))
                files.rename(root, temporary_name(change.path), change.path)
            files.remove(root, temporary_name(change.path))
        _remove_journal(home)
    return True


_JOURNAL = "apex_npu-journal"


def temporary_name(path: str) -> str:
    """Of a file, the name of its new content until that takes its place."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.apex_npu-tmp"


def _write_journal(home: Path, changes: Sequence[Change]) -> None:
    """Contents first, then the folder's name, by which it counts."""
    aside = temporary_name(_JOURNAL)
    shutil.rmtree(home / aside, ignore_errors=True)
    (home / aside).mkdir()
    for number, change in enumerate(changes):
        for side, content in (("before", change.before), ("after", change.after)):
            if content is not None:
                files.write(home, f"{aside}/{side}-{number}", content)
    files.write(home, f"{aside}/paths.json", json.dumps([change.path for change in changes]).encode())
    (home / aside).rename(home / _JOURNAL)


def _read_journal(home: Path, allowed: Sequence[Change]) -> list[Change] | None:
    listed = files.read(home, f"{_JOURNAL}/paths.json")
    if listed is None and not os.path.lexists(home / _JOURNAL):
        return None
    try:
        names = json.loads(listed or b"")
    except (ValueError, RecursionError):
        names = None
    contents = {change.path: {change.before, change.after} for change in allowed}
    known = isinstance(names, list) and all(isinstance(name, str) and name in contents for name in names)
    changes = [
        Change(name, *(files.read(home, f"{_JOURNAL}/{side}-{number}") for side in ("before", "after")))
        for number, name in enumerate(names if known else ())
    ]
    if not known or any({change.before, change.after} != contents[change.path] for change in changes):
        raise PipelineError(
            f"{home / _JOURNAL} was not left by an interrupted run: it has other files, or other contents, than the "
            f"patch gives {', '.join(contents)}. Delete that folder"
        )
    return changes


def _remove_journal(home: Path) -> None:
    """The name first, by which it counts."""
    aside = home / temporary_name(_JOURNAL)
    shutil.rmtree(aside, ignore_errors=True)
    (home / _JOURNAL).rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
