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
from collections.abc import Iterator
from pathlib import Path

from .errors import PipelineError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY


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
