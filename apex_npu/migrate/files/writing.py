# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files are replaced together: all are new, or all are as they were, also after Ctrl-C. Links are not followed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from apex_npu.compat.pipeline import files
from apex_npu.compat.pipeline.errors import PipelineError

from .planning import _SKIPPED, FileChange, git


def write_in_place(changes: Sequence[FileChange], *, allow_dirty: bool = False, backup: bool = False) -> None:
    """Give every file its new content; permissions stay.

    Args:
        changes: The files.
        allow_dirty: Also files outside git, and those with changes that are not committed.
        backup: Keep the old content of FILE as FILE.orig. Allows the same.

    Raises:
        PipelineError: A file may not be written, cannot be, or has been edited since it was read. All are as they were.
    """
    if not (allow_dirty or backup):
        _check_committed(changes)
    for change in changes:
        _check_unchanged(change)
        if backup and os.path.lexists(change.target.root / f"{change.target.path}.orig"):
            raise PipelineError(f"{change.target.shown}.orig exists: move it away, nothing has been changed")
    copies: list[FileChange] = []
    try:
        for change in changes if backup else ():
            copies.append(change)
            mode = files.mode(change.target.root, change.target.path)
            files.write(change.target.root, f"{change.target.path}.orig", change.before, mode)
        files.replace_all([files.Change(one.target.root, one.target.path, one.before, one.after) for one in changes])
    except BaseException as error:
        for change in copies:
            with contextlib.suppress(OSError):
                files.remove(change.target.root, f"{change.target.path}.orig")
        if isinstance(error, OSError):
            raise PipelineError(
                f"{error.filename} cannot be written ({error.strerror}): nothing has changed"
            ) from error
        raise


def _check_unchanged(change: FileChange) -> None:
    if files.read(change.target.root, change.target.path) != change.before:
        raise PipelineError(f"{change.target.shown} has been edited since it was read: nothing has been changed")
    if not os.access(change.target.root / change.target.path, os.W_OK):
        raise PipelineError(f"{change.target.shown} is read-only: nothing has been changed")


def _check_committed(changes: Sequence[FileChange]) -> None:
    for root in dict.fromkeys(change.target.root for change in changes):
        paths = [change.target.path for change in changes if change.target.root == root]
        tracked = git(root, "ls-files", "-z", "--", *map(_literal, paths))
        dirty = git(root, "status", "--porcelain", "-z", "--", *map(_literal, paths))
        untracked = sorted(set(paths) - set((tracked or "").split("\0")))
        if untracked or dirty:
            changed = next((path for path in paths if (dirty or "").split("\0")[0].endswith(path)), paths[0])
            name = root / (untracked[0] if untracked else changed)
            what = "is not in git" if untracked else "has changes that are not committed"
            raise PipelineError(
                f"{name} {what}: commit first, or give --backup or --allow-dirty; nothing has been changed"
            )


def _literal(path: str) -> str:
    return f":(literal){path}"


def write_copy(source: Path, changes: Sequence[FileChange], out: Path) -> None:
    """Make a copy of the file or folder ``source`` in the folder ``out``, with the new contents.

    Raises:
        PipelineError: ``out`` is there already, is inside ``source``, or cannot be written; there is no ``out`` then.
    """
    if os.path.lexists(out):
        raise PipelineError(f"{out} exists: give the name of a new folder")
    if source.resolve() in out.resolve().parents and source.is_dir():
        raise PipelineError(f"{out} is inside {source}: give a folder elsewhere")
    staged = out.with_name(files.temporary_name(out.name))
    try:
        shutil.rmtree(staged, ignore_errors=True)
        if source.is_dir():
            shutil.copytree(source, staged, symlinks=True, ignore=_not_copied)
        else:
            staged.mkdir(parents=True)
            shutil.copy(source, staged)
        for change in changes:
            files.write(staged, change.target.path, change.after, files.mode(staged, change.target.path))
        staged.rename(out)
    except (OSError, shutil.Error) as error:
        raise PipelineError(f"{out} cannot be written ({error}); look at the free space and permissions") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _not_copied(folder: str, names: list[str]) -> set[str]:
    """Folders that the search skips, too, and what is neither a file nor a folder nor a link."""

    def is_copied(name: str) -> bool:
        path = Path(folder, name)
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            return name not in _SKIPPED and not (path / "pyvenv.cfg").exists()
        return stat.S_ISREG(mode) or stat.S_ISLNK(mode)

    return {name for name in names if not is_copied(name)}
