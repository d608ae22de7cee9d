# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the patch of an era from an edited checkout, and check all patches on clones of their commits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import PipelineError, eras
from .checkout import Checkout, git
from .fetching import clone

# With more lines of context, the patch would not fit where upstream has edited nearby lines.
_OPTIONS = ("--no-renames", "--full-index", "--unified=1", "--diff-algorithm=myers", "--no-indent-heuristic")
_ROOT = Path(__file__).resolve().parents[3]
_SMOKE = """
import sys
sys.path[:0] = sys.argv[1:]
import apex, change_data_ptr, torch
from apex import amp, contrib, fp16_utils, normalization, optimizers, parallel
from apex.contrib import combine_tensors
model = torch.nn.Linear(4, 1)
optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, combine_grad=True, verbosity=0)
with amp.scale_loss(model(torch.ones(2, 4)).square().mean(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""


def difference(checkout: Checkout) -> bytes:
    """Return the patch from the commit to the files, including new ones that git does not ignore."""
    checkout.git("read-tree", checkout.head)
    names = checkout.git("ls-files", "-z", "--modified", "--others", "--exclude-standard")
    checkout.git("update-index", "-z", "--add", "--remove", "--stdin", data=names)
    return checkout.git("diff", "--cached", "--ignore-submodules=all", *_OPTIONS, checkout.head)


def make_patch(checkout: Checkout) -> str:
    """Write the patch of the era whose commit ``checkout`` has, and return a line about the result.

    Raises:
        PipelineError: The commit is not that of an era.
    """
    era = next((era for era in eras.ERAS if era.commit == checkout.head), None)
    if era is None:
        commits = ", ".join(f"{era.commit[:8]} ({era.name})" for era in eras.ERAS)
        raise PipelineError(f"{checkout.shown} is at {checkout.head[:8]}: check out the commit of an era, {commits}")
    patch = difference(checkout)
    if era.patch_file.exists() and era.patch_file.read_bytes() == patch:
        return f"unchanged: {era.patch_file}"
    era.patch_file.parent.mkdir(exist_ok=True)
    era.patch_file.write_bytes(patch)
    return f"written: {era.patch_file}"


def check(source: str) -> str:
    """Check the patches of all eras whose commit ``source`` has, and return a line per era.

    Raises:
        PipelineError: A patch fails its check, or no patch could be checked.
    """
    said = []
    for era in eras.ERAS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                tree = clone(source, era.commit, Path(folder, era.name))
            except PipelineError as error:
                said.append(f"{era.name}: skipped, {error}")
                continue
            said.append(f"{era.name}: {_check(era, Checkout(tree))}")
    if all("skipped" in line for line in said):
        raise PipelineError("\n".join(["nothing was checked", *said]))
    return "\n".join(said)


def _check(era: eras.Era, checkout: Checkout) -> str:
    patch = era.patch_file.read_bytes()
    checkout.patch()
    if difference(checkout) != patch:
        raise PipelineError(f"era {era.name}: make_patch.sh makes another patch of the patched tree")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _SMOKE, str(checkout.folder), str(_ROOT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PipelineError(f"era {era.name}: the patched tree does not train:\n{done.stderr}")
    checkout.patch(reverse=True)
    if left := git(checkout.folder, "status", "--porcelain", "--ignored"):
        raise PipelineError(f"era {era.name}: --reverse leaves changes: {left.decode()}")
    if shutil.which("patch"):
        by_patch = subprocess.run(["patch", "-p1"], cwd=checkout.folder, input=patch, capture_output=True, check=False)
        if by_patch.returncode or not checkout.inspect()[2]:
            raise PipelineError(f"era {era.name}: `patch -p1` refuses the patch: {by_patch.stdout.decode()}")
    return "the patch fits"
