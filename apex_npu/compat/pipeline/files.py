# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files of a tree that is not trusted: no link is followed, and no file is opened for writing that was there before.

A path is relative to a folder, with "/" between its parts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import PipelineError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY


@dataclass(frozen=True)
class Change:
    """What the file at ``path`` in the folder ``root`` holds before and after; None where there is none."""

    root: Path
    path: str
    before: bytes | None
    after: bytes | None

    def reversed(self) -> Change:
        """The same, backwards."""
        return Change(self.root, self.path, self.after, self.before)


@contextlib.contextmanager
def _parent(root: Path, path: str) -> Iterator[tuple[int, str]]:
    """The opened folder that holds ``path``, and the name of ``path`` in it."""
    *folders, name = path.split("/")
    handle = os.open(root, _FOLDER)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle, name
    finally:
        os.close(handle)


def read(root: Path, path: str) -> bytes | None:
    """The contents of a file, None where there is none.

    Raises:
        PipelineError: ``path`` is something else, or cannot be read.
    """
    try:
        with _parent(root, path) as (folder, name):
            # Not blocking: a named pipe may have no other end.
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            with open(handle, "rb") as file:
                return file.read()
        os.close(handle)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise PipelineError(
                f"{root / path} is a link, or is inside one, or inside a file: links are not followed"
            ) from None
        raise PipelineError(f"{root / path} cannot be read ({error.strerror})") from None
    raise PipelineError(f"{root / path} is no regular file")


def write(root: Path, path: str, content: bytes, mode: int | None = None) -> None:
    """Make a new file. A file or link of this name is removed first; what a link points to stays as it is."""
    remove(root, path)
    with _parent(root, path) as (folder, name):
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            if mode is not None:
                os.fchmod(handle, mode)
            os.fsync(handle)


def mode(root: Path, path: str) -> int | None:
    """The permissions of a file, None where there is none."""
    with _parent(root, path) as (folder, name), contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode & 0o777
    return None


def rename(root: Path, path: str, target: str) -> None:
    """Give the file the name of ``target``, in the same folder; a file or link of that name is replaced."""
    with _parent(root, path) as (folder, name):
        os.replace(name, target.rpartition("/")[2], src_dir_fd=folder, dst_dir_fd=folder)


def remove(root: Path, path: str) -> None:
    """Remove a file or a link; nothing where there is none."""
    with _parent(root, path) as (folder, name), contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def temporary_name(path: str) -> str:
    """Of a file, the name of its new content until that takes its place."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.apex_npu-tmp"


def replace_all(changes: Sequence[Change]) -> None:
    """Bring every file from ``before`` to ``after``: all, or none. Permissions stay.

    New contents are written under temporary names first, so that a full disk changes no file.

    Raises:
        PipelineError: A file cannot be written.
        KeyboardInterrupt: After either, all files are as they were. Only SIGKILL leaves some of them new.
    """
    modes = {change: mode(change.root, change.path) for change in changes}
    placed: list[Change] = []
    try:
        for change in changes:
            _write_aside(change, modes[change])
        for change in changes:
            placed.append(change)
            _place(change)
    except BaseException as error:
        for change in placed:
            _write_aside(change.reversed(), modes[change])
            _place(change.reversed())
        if not isinstance(error, OSError):
            raise
        raise PipelineError(
            f"{changes[0].root} cannot be written ({error.strerror}: {error.filename}); it is as it was. Look at the "
            "free space and at the permissions of the folder"
        ) from error
    finally:
        for change in changes:
            with contextlib.suppress(OSError):
                remove(change.root, temporary_name(change.path))


def _write_aside(change: Change, mode: int | None) -> None:
    """Write the new content under its temporary name."""
    if change.after is not None:
        write(change.root, temporary_name(change.path), change.after, mode)


def _place(change: Change) -> None:
    """Rename the new content to the file's name, or remove the file."""
    if change.after is None:
        remove(change.root, change.path)
    else:
        rename(change.root, temporary_name(change.path), change.path)
