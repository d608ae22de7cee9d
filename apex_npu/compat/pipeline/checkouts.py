# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkouts of upstream: a patched clone, which is created completely or not at all, and the patch of an edited one."""

from __future__ import annotations

import filecmp
import os
import tempfile
from pathlib import Path

from . import PipelineError, eras
from .patching import git, patch

# With more lines of context, the patch would not fit where upstream has edited nearby lines.
_OPTIONS = ("--no-renames", "--full-index", "--unified=1", "--diff-algorithm=myers", "--no-indent-heuristic")


def generate(source: str | None, ref: str | None, out: Path) -> str:
    """Clone upstream to ``out`` and patch the clone. Only patch ``out`` if it already exists.

    Args:
        source: A folder or a URL; the default is upstream's URL.
        ref: A commit, tag or branch, or the name of an era; the default is a folder's HEAD, or the default era.
        out: The folder of the clone.

    Raises:
        PipelineError: Cloning or patching fails, or without ``ref`` a folder has changes that a clone of its HEAD would
            not have. ``out`` is unchanged.
        OSError: ``out`` cannot be written. It is unchanged.
    """
    commit = eras.COMMITS.get(ref, ref) if ref else None
    if out.is_dir() and any(out.iterdir()):
        head = _commit_of(out, "HEAD")
        if commit and head is None:
            raise PipelineError(f"{out} is no git checkout, which could be at {ref}: give another --out, or no --ref")
        if commit and head != _commit_of(out, commit):
            raise PipelineError(f"{out} is at {head}, which is not {ref}: give another --out")
        return patch(out)
    local = source is not None and Path(source).exists()
    as_it_is = local and commit is None and Path(source or "", ".git").exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent.resolve()) as folder:
        target = Path(folder, "apex")
        _clone(source or eras.UPSTREAM, commit or ("HEAD" if local else eras.COMMITS[eras.DEFAULT]), target)
        edited = _differing(source, target) if as_it_is else []
        said = patch(target, shown=out)
        if edited and (beside := _differing(source, target)):  # else the folder is patched, as the clone is now
            name = next((one for one in edited if one in beside), edited[0])
            raise PipelineError(
                f"{source} has changes that are not committed, as in {name}: commit them, set them aside (git stash), "
                "or give --ref HEAD to leave them out"
            )
        target.rename(out)
    return said


def _differing(source: str | None, target: Path) -> list[str]:
    """Return the files, without those of submodules, that are not the same in both folders."""
    names = [name for name in git(target, "ls-files", "-z").split("\0") if (target / name).is_file()]
    _, different, missing = filecmp.cmpfiles(str(source), target, names, shallow=False)
    return [*different, *missing]


def _clone(source: str, ref: str, target: Path) -> None:
    """Clone ``source`` to ``target``, with the files of ``ref`` as its commit has them."""
    source = str(Path(source).resolve()) if Path(source).exists() else source
    git(target.parent, "clone", "--quiet", "--no-checkout", "--config", "core.autocrlf=false", "--", source, target)
    commit = _commit_of(target, ref)
    if commit is None:
        raise PipelineError(f"{source} has no commit, tag or branch {ref!r}")
    git(target, "checkout", "--quiet", "--detach", commit)


def _commit_of(folder: Path, ref: str) -> str | None:
    """Return the commit that ``ref`` names in the checkout in ``folder``, if any; not in one around ``folder``."""
    options = ("--verify", "--quiet", "--end-of-options")
    limits = {"GIT_ALLOW_PROTOCOL": "none", "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    for name in ("HEAD",) if ref == "HEAD" else (ref, f"origin/{ref}"):
        try:
            return git(folder, "rev-parse", *options, f"{name}^{{commit}}", **limits).strip()
        except PipelineError:
            continue
    return None


def difference(folder: Path) -> str:
    """Return the patch from the commit of a checkout to its files, including new ones that git does not ignore."""
    with tempfile.TemporaryDirectory() as aside:
        variables = {"GIT_INDEX_FILE": f"{aside}/index", "GIT_CONFIG_GLOBAL": os.devnull}
        git(folder, "read-tree", "HEAD", **variables)
        git(folder, "add", "--all", **variables)
        return git(folder, "diff", "--cached", "--no-ext-diff", *_OPTIONS, "HEAD", **variables)


def make_patch(folder: Path) -> str:
    """Write the patch of the era whose commit the checkout in ``folder`` has, and return a line about the result.

    The checkout is one's own: git reads its settings.

    Raises:
        PipelineError: There is no checkout in ``folder``, or its commit is not that of an era.
    """
    if not folder.is_dir():
        raise PipelineError(f"{folder} is not a folder: name a clone of {eras.UPSTREAM}")
    head = _commit_of(folder, "HEAD")
    if head is None:
        raise PipelineError(f"{folder} is no git checkout: name a clone of {eras.UPSTREAM}")
    era = next((era for era in eras.ERAS if era.commit == head), None)
    if era is None:
        commits = ", ".join(f"{era.commit[:8]} ({era.name})" for era in eras.ERAS)
        raise PipelineError(f"{folder} is not at the commit of an era: check out {commits}")
    era.patch_file.parent.mkdir(exist_ok=True)
    era.patch_file.write_bytes(os.fsencode(difference(folder)))
    return f"written: {era.patch_file}"
