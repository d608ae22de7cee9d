# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files are replaced together: all are new, or all are as they were, also after Ctrl-C. Links are not followed."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from .planning import _SKIPPED, FileChange, git


def write_in_place(changes: Sequence[FileChange], *, allow_dirty: bool = False, backup: bool = False) -> None:
    """Give every file its new content; permissions stay.

    Args:
        changes: The files.
        allow_dirty: Also files outside git, and those with changes that are not committed.
        backup: Keep the old content of FILE as FILE.orig. Allows the same.

    Raises:
        ValueError: A file may not be written, cannot be, or has been edited since it was read. All are as they were.
    """
    if not (allow_dirty or backup):
        _check_committed(changes)
    try:
        for change in changes:
            _check_unchanged(change)
            if backup and os.path.lexists(change.target.root / f"{change.target.path}.orig"):
                raise ValueError(f"{change.target.shown}.orig exists: move it away, nothing has been changed")
        _replace(changes, backup)
    except OSError as error:
        raise ValueError(
            f"{error.filename} cannot be written ({error.strerror}): nothing has been changed. Look at the free space "
            "and at the permissions of the folder"
        ) from error


def _replace(changes: Sequence[FileChange], backup: bool) -> None:
    """Write all contents beside the files, so that only renames are left to do, or to undo."""
    with ExitStack() as stack:
        asides: list[tuple[Path, Path]] = []
        for change in changes:
            path = change.target.root / change.target.path
            aside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".apex_npu-", dir=path.parent)))
            asides.append((path, aside))
            for name, content in (("new", change.after), ("old", change.before), ("orig", change.before)):
                (aside / name).write_bytes(content)
                shutil.copymode(path, aside / name)
        try:
            for path, aside in asides:
                if backup:
                    os.replace(aside / "orig", f"{path}.orig")
                os.replace(aside / "new", path)
        except BaseException:
            for path, aside in asides:
                if not (aside / "new").exists():
                    os.replace(aside / "old", path)
                if not (aside / "orig").exists():
                    os.unlink(f"{path}.orig")
            raise


def _check_unchanged(change: FileChange) -> None:
    if change.target.read() != change.before:
        raise ValueError(f"{change.target.shown} has been edited since it was read: nothing has been changed")
    if not os.access(change.target.root / change.target.path, os.W_OK):
        raise ValueError(f"{change.target.shown} is read-only: nothing has been changed")


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
            raise ValueError(
                f"{name} {what}: commit first, or give --backup or --allow-dirty; nothing has been changed"
            )


def _literal(path: str) -> str:
    return f":(literal){path}"


def write_copy(source: Path, changes: Sequence[FileChange], out: Path) -> None:
    """Make a copy of the file or folder ``source`` in the folder ``out``, with the new contents.

    Raises:
        ValueError: ``out`` is there already, is inside ``source``, or cannot be written; there is no ``out`` then.
    """
    if os.path.lexists(out):
        raise ValueError(f"{out} exists: give the name of a new folder")
    if source.resolve() in out.resolve().parents and source.is_dir():
        raise ValueError(f"{out} is inside {source}: give a folder elsewhere")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".apex_npu-", dir=out.parent) as folder:
            staged = Path(folder, "copy")
            if source.is_dir():
                shutil.copytree(source, staged, symlinks=True, ignore=_not_copied)
            else:
                staged.mkdir()
                shutil.copy(source, staged)
            for change in changes:
                path = staged / change.target.path
                mode = path.stat().st_mode
                path.unlink()  # it may be read-only
                path.write_bytes(change.after)
                path.chmod(stat.S_IMODE(mode))
            staged.rename(out)
    except (OSError, shutil.Error) as error:
        raise ValueError(f"{out} cannot be written ({error}); look at the free space and permissions") from error


def _not_copied(folder: str, names: list[str]) -> set[str]:
    """Folders that the search skips, too, and what is neither a file nor a folder nor a link."""

    def is_copied(name: str) -> bool:
        path = Path(folder, name)
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            return name not in _SKIPPED and not (path / "pyvenv.cfg").exists()
        return stat.S_ISREG(mode) or stat.S_ISLNK(mode)

    return {name for name in names if not is_copied(name)}
