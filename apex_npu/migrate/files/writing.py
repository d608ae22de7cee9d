# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the changed files of a plan, in place or as a copy. All files change, or none.

In place, the old contents must be in git or are written to ``FILE.orig``.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .planning import FileChange, git, is_skipped


def write_in_place(changes: Sequence[FileChange], *, allow_dirty: bool = False, backup: bool = False) -> None:
    """Write the new content of every file. Permissions stay the same.

    Args:
        changes: The files.
        allow_dirty: Also write files outside git, and files with changes that are not committed.
        backup: Keep the old content of FILE as FILE.orig. This also allows the files of ``allow_dirty``.

    Raises:
        ValueError: A file must not or cannot be written, or was edited after it was read. No file has changed.
    """
    if not (allow_dirty or backup):
        _check_committed(changes)
    try:
        for change in changes:
            path = change.target.file
            if change.target.read() != change.before:
                raise ValueError(f"{change.target.shown} has been edited since it was read: nothing has been changed")
            if not os.access(path, os.W_OK):
                raise ValueError(f"{change.target.shown} is read-only: nothing has been changed")
            if backup and os.path.lexists(f"{path}.orig"):
                raise ValueError(f"{change.target.shown}.orig exists: move it away, nothing has been changed")
        _replace(changes, backup)
    except OSError as error:
        raise ValueError(
            f"{error.filename} cannot be written ({error.strerror}): nothing has been changed. Look at the free space "
            "and at the permissions of the folder"
        ) from error


def _replace(changes: Sequence[FileChange], backup: bool) -> None:
    """Write all contents beside the files first, so that only renames remain. After an error, undo those done."""
    beside: list[Path] = []
    try:
        for change in changes:
            path = change.target.file
            news = {path.with_name(f".{path.name}.apex_npu-new"): change.after}
            for one, content in (news | {Path(f"{path}.orig"): change.before} if backup else news).items():
                beside.append(one)
                one.write_bytes(content)
                shutil.copymode(path, one)
        for change in changes:
            path = change.target.file
            os.replace(path.with_name(f".{path.name}.apex_npu-new"), path)
    except BaseException:
        for change in changes:
            if change.target.file.read_bytes() == change.after:
                change.target.file.write_bytes(change.before)
        for one in beside:
            one.unlink(missing_ok=True)
        raise


def _check_committed(changes: Sequence[FileChange]) -> None:
    for root in dict.fromkeys(change.target.root for change in changes):
        paths = [change.target.path for change in changes if change.target.root == root]
        options = ("--porcelain", "-z", "--ignored", "--untracked-files=all")
        listed = git(root, "status", *options, "--", *(f":(literal){path}" for path in paths))
        if listed != "":
            first = (listed or "??").partition("\0")[0]
            below = (git(root, "rev-parse", "--show-prefix") or "").removesuffix("\n")  # git counts from its top folder
            name = next((path for path in paths if f"{below}{path}" == first[3:]), paths[0])
            what = "is not in git" if first[:2] in ("??", "!!") else "has changes that are not committed"
            raise ValueError(
                f"{root / name} {what}: commit first, or pass --backup or --allow-dirty; nothing has been changed"
            )


def write_copy(source: Path, changes: Sequence[FileChange], out: Path) -> None:
    """Copy the file or folder ``source`` to the new folder ``out``, with the new contents.

    Raises:
        ValueError: ``out`` exists, is inside ``source``, or cannot be written. Nothing has been written to it.
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
    """Return the names that a copy leaves out: folders that the search skips, named pipes, sockets and devices."""
    paths = [path for path in (Path(folder, name) for name in names) if not path.is_symlink()]
    return {path.name for path in paths if (is_skipped(path) if path.is_dir() else not path.is_file())}
