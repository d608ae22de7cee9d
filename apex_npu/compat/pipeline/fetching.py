# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A patched clone of upstream in its own folder, which is created completely or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from . import PipelineError, eras
from .checkout import Checkout, git


def generate(source: str | None, ref: str | None, out: Path) -> str:
    """Clone upstream to ``out`` and patch the clone. Only patch ``out`` if it already exists.

    Args:
        source: A folder or a URL; the default is upstream's URL.
        ref: A commit, tag or branch, or the name of an era; the default is a folder's HEAD, or the default era.
        out: The folder of the clone.

    Raises:
        PipelineError: Cloning or patching fails. ``out`` is unchanged.
        OSError: ``out`` cannot be written. It is unchanged.
    """
    commit = eras.COMMITS.get(ref, ref) if ref else None
    if out.is_dir() and any(out.iterdir()):
        there = Checkout(out)
        if commit and there.resolve(commit) != there.head:
            raise PipelineError(f"{out} is at {there.head[:12]}, which is not {ref}: give another --out")
        return there.patch()
    if source is None or not Path(source).exists():
        source, commit = source or eras.UPSTREAM, commit or eras.COMMITS[eras.DEFAULT]
    elif commit is None and Path(source, ".git").exists():
        checkout = Checkout(Path(source))
        checkout.inspect()  # the clone would not have other changes
        commit = checkout.head
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent.resolve()) as folder:
        unfinished = clone(source, commit or "HEAD", Path(folder, "apex"))
        said = Checkout(unfinished, shown=out).patch()
        unfinished.rename(out)
    return said


def clone(source: str, ref: str, target: Path) -> Path:
    """Clone ``source`` to ``target``, with the files of ``ref`` as its commit has them, and return ``target``.

    Raises:
        PipelineError: ``ref`` or ``source`` does not exist.
    """
    source = str(Path(source).resolve()) if Path(source).exists() else source
    git(target.parent, "clone", "--quiet", "--no-checkout", "--config", "core.autocrlf=false", "--", source, target)
    commit = Checkout(target).resolve(ref)
    if commit is None:
        raise PipelineError(f"{source} has no commit, tag or branch {ref!r}")
    git(target, "checkout", "--quiet", "--detach", commit)
    return target
