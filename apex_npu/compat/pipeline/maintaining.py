# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes the patch of an era from an edited checkout."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from . import PipelineError, eras
from .fetching import commit_of
from .patching import git

# With more lines of context, the patch would not fit where upstream has edited nearby lines.
_OPTIONS = ("--no-renames", "--full-index", "--unified=1", "--diff-algorithm=myers", "--no-indent-heuristic")


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
    head = commit_of(folder, "HEAD")
    if head is None:
        raise PipelineError(f"{folder} is no git checkout: name a clone of {eras.UPSTREAM}")
    era = next((era for era in eras.ERAS if era.commit == head), None)
    if era is None:
        commits = ", ".join(f"{era.commit[:8]} ({era.name})" for era in eras.ERAS)
        raise PipelineError(f"{folder} is not at the commit of an era: check out {commits}")
    era.patch_file.parent.mkdir(exist_ok=True)
    era.patch_file.write_bytes(os.fsencode(difference(folder)))
    return f"written: {era.patch_file}"
