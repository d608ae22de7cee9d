# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""From a checkout of Apex to a wheel, installed and trained with, and back to the checkout."""

from __future__ import annotations

import zipfile
from pathlib import Path

from pipeline.environments import Environment, script
from pipeline.synthetic import git, snapshot

TRAIN = """
import sys
import torch
from apex import amp
import apex, apex_npu
assert apex_npu.__file__.startswith(sys.prefix) and apex.__file__.startswith(sys.prefix)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = apex.optimizers.NpuFusedAdam(model.parameters(), lr=2e-2)
reference = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
reference.load_state_dict(model.state_dict())
adam = torch.optim.Adam(reference.parameters(), lr=2e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, combine_grad=True, verbosity=0)
x = torch.randn(64, 6)
for _ in range(20):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    adam.zero_grad()
    expected = torch.nn.functional.mse_loss(reference(x), x.sum(1, keepdim=True))
    expected.backward()
    adam.step()
from apex_npu._extension import extension
print(loss.item(), expected.item(), extension is not None)
"""


def build(environment: Environment, source: Path | str, folder: Path, *arguments: str, **variables: str) -> Path:
    """The wheel that build.sh makes of ``source`` for ``environment``."""
    options = (f"--python={environment.python}", f"--source={source}", f"--wheel-dir={folder}", *arguments)
    done = script("build", *options, cwd=folder.parent, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = Path(done.stdout.splitlines()[-1])
    assert wheel.parent == folder
    return wheel


def live_through(source: Path, folder: Path, ref: str | None = None, **variables: str) -> zipfile.ZipFile:
    """Clone, gen, build, install, train, uninstall, and take the patch out again; in paths with spaces.

    Returns:
        The wheel.
    """
    out = folder / "an apex"
    chosen = () if ref is None else (f"--ref={ref}",)
    assert script("gen", f"--source={source}", f"--out={out}", *chosen, cwd=folder).returncode == 0
    patched = snapshot(out)
    environment = Environment(folder / "an environment")
    before = snapshot(environment.site)

    wheel = build(environment, out, folder / "the wheels", **variables)
    assert snapshot(out) == patched  # built in a copy
    environment.pip("install", wheel)
    assert "apex 0.1+ascend" in environment.pip("list", "--format=freeze").replace("==", " ")
    loss, expected, has_extension = environment.output("-W", "ignore", "-c", TRAIN).split()
    assert abs(float(loss) - float(expected)) < 0.02 * float(expected)  # the weights' float16
    assert has_extension == str(not variables.get("APEX_NPU_NO_EXT"))
    environment.pip("uninstall", "--yes", "apex")
    assert snapshot(environment.site) == before

    assert script("gen", "--reverse", f"--out={out}", cwd=folder).returncode == 0
    assert git(out, "status", "--porcelain", "--ignored") == ""
    return zipfile.ZipFile(wheel)
