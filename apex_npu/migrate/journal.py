# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The journal of ``--write``: from what a killed process leaves, the next one makes all files as they were.

Each folder that files are written in has a journal with their old contents. All of them count as long as that of the
first folder, which is made last and removed first, is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from apex_npu.compat.pipeline import files
from apex_npu.compat.pipeline.errors import PipelineError
from apex_npu.compat.pipeline.replacing import alone, temporary_name

from .planning import JOURNAL, FileChange


@dataclass(frozen=True)
class Journal:
    """What is written in one folder.

    Attributes:
        id: The same in all folders of one run.
        folders: All of them, the one that counts first.
        paths: Files below this folder; their old contents are in files of the journal, by number.
        after: Digests of the new contents.
        backup: Whether FILE.orig is made, too.
    """

    id: str
    folders: tuple[str, ...]
    paths: tuple[str, ...]
    after: tuple[str, ...]
    backup: bool


@contextlib.contextmanager
def locked(folders: Sequence[Path]) -> Iterator[None]:
    """Keep other processes of this kind from ``folders``.

    Raises:
        PipelineError: Another one is there.
    """
    with contextlib.ExitStack() as stack:
        for folder in sorted({path.resolve() for path in folders}):
            stack.enter_context(alone(folder))
        yield


def begin(changes: Sequence[FileChange], *, backup: bool) -> tuple[Path, ...]:
    """Record what files hold; the folders with a journal.

    Raises:
        OSError: A journal cannot be written.
    """
    of_folder: dict[Path, list[FileChange]] = {}
    for change in changes:
        of_folder.setdefault(change.target.root.resolve(), []).append(change)
    name = secrets.token_hex(8)
    folders = tuple(of_folder)
    for folder in reversed(folders):
        aside = temporary_name(JOURNAL)
        shutil.rmtree(folder / aside, ignore_errors=True)
        (folder / aside).mkdir()
        own = of_folder[folder]
        for number, change in enumerate(own):
            files.write(folder, f"{aside}/before-{number}", change.before)
        digests = tuple(_digest(change.after) for change in own)
        record = Journal(name, tuple(map(str, folders)), tuple(one.target.path for one in own), digests, backup)
        files.write(folder, f"{aside}/journal.json", json.dumps(asdict(record)).encode())
        (folder / aside).rename(folder / JOURNAL)
    return folders


def end(folders: Sequence[Path]) -> None:
    """Forget the journals: what the files hold now is what they are to hold."""
    for folder in folders:
        aside = folder / temporary_name(JOURNAL)
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            (folder / JOURNAL).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def take_back(paths: Sequence[Path]) -> bool:
    """Undo what a killed process has left in folders, or in those of files.

    Only files below them are written, whatever a journal says.

    Returns:
        Whether there was anything.

    Raises:
        PipelineError: A journal is not ours, or is of other folders, too; a file has been edited since, or cannot be
            written.
    """
    given = list(dict.fromkeys((path if path.is_dir() else path.parent).resolve() for path in paths if path.exists()))
    with locked(given):
        for folder in given:
            shutil.rmtree(folder / temporary_name(JOURNAL), ignore_errors=True)
        read = {folder: _read(folder) for folder in given}
        found = {folder: journal for folder, journal in read.items() if journal is not None}
        done = False
        for folder, journal in found.items():
            if os.path.lexists(folder / JOURNAL):
                done |= _take_back(folder, journal, found)
        return done


def _take_back(folder: Path, journal: Journal, found: Mapping[Path, Journal]) -> bool:
    folders = tuple(map(Path, journal.folders))
    first = found[folders[0]] if folders[0] in found else _read(folders[0])
    if first is None or first.id != journal.id:
        end([folder])
        return False
    missing = [str(one) for one in folders if one not in found or found[one].id != journal.id]
    if missing:
        raise PipelineError(
            f"an earlier --write was interrupted, which wrote files in {missing[0]}, too: give that folder as well"
        )
    states = [state for one in folders for state in _states(one, found[one])]
    try:
        for root, path, before, present, backup in states:
            if present != before:
                files.write(root, temporary_name(path), before, files.mode(root, path))
                files.rename(root, temporary_name(path), path)
            files.remove(root, temporary_name(path))
            if backup and files.read(root, f"{path}.orig") is not None:
                files.remove(root, f"{path}.orig")
    except OSError as error:
        raise PipelineError(
            f"{folder} cannot be written ({error.strerror}: {error.filename}); the next run goes on with what an "
            "interrupted one has left. Look at the free space and at the permissions of the folder"
        ) from error
    end(folders)
    return True


def _states(root: Path, journal: Journal) -> Iterator[tuple[Path, str, bytes, bytes | None, bool]]:
    """Of each file its folder, its path, the old and the present content, and whether it has a copy of the old one."""
    for number, (path, after) in enumerate(zip(journal.paths, journal.after, strict=True)):
        before, present = files.read(root, f"{JOURNAL}/before-{number}"), files.read(root, path)
        if before is None:
            raise _not_ours(root)
        if present != before and (present is None or _digest(present) != after):
            raise PipelineError(
                f"an earlier --write was interrupted, and {root / path} has been edited since: that cannot be undone. "
                f"What was there before is in {root / JOURNAL}; put the files in order and delete that folder"
            )
        yield root, path, before, present, journal.backup


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _not_ours(folder: Path) -> PipelineError:
    return PipelineError(f"{folder / JOURNAL} was not left by an interrupted --write: look at it, and delete it")


def _read(folder: Path) -> Journal | None:
    """The journal in a folder, if there is one."""
    if not os.path.lexists(folder / JOURNAL):
        return None
    if (folder / JOURNAL).is_file() and not (folder / JOURNAL).is_symlink():
        raise _not_ours(folder)
    try:
        read = json.loads(files.read(folder, f"{JOURNAL}/journal.json") or b"")
        texts = [read["id"], *read["folders"], *read["paths"], *read["after"]]
        paths = [PurePosixPath(path) for path in read["paths"]]
        fits = all(isinstance(one, str) for one in texts) and len(read["paths"]) == len(read["after"])
        inside = all(path.parts and not path.is_absolute() and ".." not in path.parts for path in paths)
        ours = all(path.suffix in (".py", ".pyw", ".ipynb") for path in paths) and str(folder) in read["folders"]
        if not (fits and inside and ours and isinstance(read["backup"], bool)):
            raise ValueError(folder)
        folders, names, after = (tuple(read[name]) for name in ("folders", "paths", "after"))
        return Journal(read["id"], folders, names, after, read["backup"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _not_ours(folder) from None
