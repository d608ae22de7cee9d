# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""From an edited checkout back to the patch: the same tree gives the same bytes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from . import eras
from .checkout import Checkout
from .errors import PipelineError

MAX_FILES = 8
MAX_LINES = 60
# One line of context finds the place; more of it would fail to, where upstream has edited nearby.
_OPTIONS = (
    *("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--full-index", "--unified=1"),
    *("--inter-hunk-context=0", "--diff-algorithm=myers", "--no-indent-heuristic"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=all"),
)


def difference(checkout: Checkout) -> bytes:
    """The patch that leads from the commit of ``checkout`` to its files, new ones included that git does not ignore."""
    checkout.git("read-tree", "HEAD")
    # git would look into submodules by what their own configuration says; no patch changes them.
    for entry in filter(None, checkout.git("ls-tree", "-r", "-z", "HEAD").split(b"\0")):
        if entry.startswith(b"160000 "):
            path = entry.partition(b"\t")[2]
            checkout.git("update-index", "--force-remove", "--", os.fsdecode(path))
    checkout.git("-c", "core.autocrlf=false", "add", "--all", ".")
    return checkout.git("diff", "--cached", *_OPTIONS, "HEAD")


def changed_lines(patch: bytes) -> dict[str, int]:
    """Of each file in ``patch`` how many lines are added or removed.

    Raises:
        PipelineError: It is more than a patch of text that says why it is there.
    """
    found = {}
    for part in re.split(rb"^diff --git .*\n", patch, flags=re.MULTILINE)[1:]:
        head, *hunks = re.split(rb"^(?=@@ )", part, flags=re.MULTILINE)
        new = re.search(rb"^\+\+\+ b/(.+)$", head, flags=re.MULTILINE)
        if new is None or b"\nrename " in head or not hunks:
            raise PipelineError("a patch may change and add files of text, nothing else")
        if not all(re.search(rb"^\+\s*# apex_npu: ", hunk, flags=re.MULTILINE) for hunk in hunks):
            raise PipelineError(
                f"every hunk says why in a comment `# apex_npu: ...`; one of {new[1].decode()} does not"
            )
        found[new[1].decode()] = sum(line[:1] in (b"+", b"-") for hunk in hunks for line in hunk.splitlines())
    return found


def check_limits(patch: bytes) -> dict[str, int]:
    """Raise unless ``patch`` is small, and says why it is there; ``changed_lines`` otherwise."""
    files = changed_lines(patch)
    lines = sum(files.values())
    if len(files) > MAX_FILES or lines > MAX_LINES:
        raise PipelineError(
            f"a patch points at apex_npu, in at most {MAX_FILES} files and {MAX_LINES} lines; this one has "
            f"{len(files)} and {lines} ({', '.join(files)}): put the logic into apex_npu"
        )
    return files


def make_patch(checkout: Checkout, folder: Path = eras.FOLDER) -> str:
    """Write the patch of the era whose commit ``checkout`` has.

    Returns:
        A line that says what has been done.

    Raises:
        PipelineError: It is no era's commit, or its changes are no patch.
    """
    known = eras.load(folder)
    era = next((era for era in known.eras if era.commit == checkout.head), None)
    if era is None:
        pins = ", ".join(f"{era.commit[:8]} ({era.name})" for era in known.eras)
        raise PipelineError(f"expected a checkout at {pins}, found {checkout.describe()}")
    patch = difference(checkout)
    check_limits(patch)
    target = era.patch_file(folder)
    if target.exists() and target.read_bytes() == patch:
        return f"unchanged: {target}"
    target.parent.mkdir(exist_ok=True)
    aside = target.with_name(f".{target.name}.tmp")
    aside.write_bytes(patch)
    aside.replace(target)
    return f"written: {target}"
