# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What has to hold of each patch, tried on clean checkouts of the commits that they are made from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import eras, make_patch
from .checkout import Checkout, git
from .errors import PipelineError
from .fetching import clone
from .patching import State, inspect, set_state

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


def check(source: str) -> str:
    """Check the patches of all eras whose commit ``source`` has.

    Returns:
        A line per era.

    Raises:
        PipelineError: A patch is not as it should be, or there was none to check.
    """
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        upstream = Path(folder) / "upstream"
        clone(source, upstream)
        for era in eras.load().eras:
            if Checkout(upstream).resolve(era.commit) is None:
                lines.append(f"{era.name}: skipped, {source} lacks {era.commit[:8]}")
                continue
            lines_of = _check_era(era, upstream)
            lines.append(f"{era.name}: {len(lines_of)} files, {sum(lines_of.values())} lines")
    if all("skipped" in line for line in lines):
        raise PipelineError(f"{source} has the commit of no era, so nothing was checked")
    return "\n".join(lines)


def _check_era(era: eras.Era, upstream: Path) -> dict[str, int]:
    """Of each file how many lines are changed."""
    patch = era.patch_file().read_bytes()
    files = make_patch.check_limits(patch)
    table = (eras.FOLDER / "README.md").read_text(encoding="utf-8")
    if missing := [path for path in files if f"\n| `{path}`" not in table]:
        raise PipelineError(f"era {era.name}: patch/README.md has no row for {', '.join(missing)}")
    git("checkout", "--quiet", "--force", "--detach", era.commit, cwd=upstream)
    git("clean", "--quiet", "-ffdx", cwd=upstream)
    checkout = Checkout(upstream)

    if shutil.which("patch"):
        done = subprocess.run(["patch", "-p1"], cwd=upstream, input=patch, capture_output=True, check=False)
        if done.returncode or inspect(checkout).state is not State.PATCHED:
            raise PipelineError(
                f"era {era.name}: `patch -p1` refuses the patch: {(done.stdout + done.stderr).decode()}"
            )
        set_state(checkout, State.ORIGINAL)
    set_state(checkout, State.PATCHED)
    if make_patch.difference(checkout) != patch:
        raise PipelineError(f"era {era.name}: make_patch.sh makes another patch of the patched tree")
    _smoke(era, checkout)
    set_state(checkout, State.ORIGINAL)
    if left := git("status", "--porcelain", "--ignored", cwd=upstream):
        raise PipelineError(f"era {era.name}: --reverse leaves changes: {left.decode()}")
    return files


def _smoke(era: eras.Era, checkout: Checkout) -> None:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _SMOKE, str(checkout.folder), str(_ROOT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PipelineError(f"era {era.name}: the patched tree does not train:\n{done.stderr}")
