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

from . import diffs, eras, make_patch
from .checkout import Checkout, git
from .errors import PipelineError
from .fetching import clone
from .patching import State, bring

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
            files = _check_era(era, upstream)
            lines.append(f"{era.name}: {len(files)} files, {sum(file.changed_lines for file in files)} lines")
    if all("skipped" in line for line in lines):
        raise PipelineError(f"{source} has the commit of no era, so nothing was checked")
    return "\n".join(lines)


def _check_era(era: eras.Era, upstream: Path) -> tuple[diffs.FileDiff, ...]:
    patch = era.patch_file().read_bytes()
    make_patch.check_limits(patch)
    files = diffs.parse(patch)
    table = (eras.FOLDER / "README.md").read_text(encoding="utf-8")
    if missing := [file.path for file in files if f"\n| `{file.path}`" not in table]:
        raise PipelineError(f"era {era.name}: patch/README.md has no row for {', '.join(missing)}")
    git("checkout", "--quiet", "--force", "--detach", era.commit, cwd=upstream)
    git("clean", "--quiet", "-ffdx", cwd=upstream)
    checkout = Checkout(upstream)
    expect = _Expectation(era)

    bring(checkout, State.PATCHED)
    ours = {file.path: checkout.present(file.path) for file in files}
    expect.same("apex_npu and `git apply`", ours, _applied(["git", "apply"], checkout, files, patch))
    if shutil.which("patch"):
        expect.same("apex_npu and `patch -p1`", ours, _applied(["patch", "-p1"], checkout, files, patch))
    expect.same("the patch and what make_patch.sh makes of the patched tree", patch, make_patch.difference(checkout))
    _smoke(era, checkout)
    bring(checkout, State.ORIGINAL)
    expect.same("the tree before and after", b"", git("status", "--porcelain", "--ignored", cwd=upstream))
    return files


class _Expectation:
    def __init__(self, era: eras.Era) -> None:
        self.era = era

    def same(self, what: str, one: object, other: object) -> None:
        if one != other:
            raise PipelineError(f"era {self.era.name}: {what} differ")


def _applied(
    command: list[str], checkout: Checkout, files: tuple[diffs.FileDiff, ...], patch: bytes
) -> dict[str, bytes | None]:
    """What the files become where another program applies the patch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in files:
            content = checkout.committed(file.path)
            if content is not None:
                (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
                (folder / file.path).write_bytes(content)
        done = subprocess.run(command, cwd=folder, input=patch, capture_output=True, check=False)
        if done.returncode:
            raise PipelineError(f"`{' '.join(command)}` refuses the patch: {(done.stdout + done.stderr).decode()}")
        return {file.path: (folder / file.path).read_bytes() for file in files}


def _smoke(era: eras.Era, checkout: Checkout) -> None:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _SMOKE, str(checkout.folder), str(_ROOT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PipelineError(f"era {era.name}: the patched tree does not train:\n{done.stderr}")
