# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Scripts as they are published, unchanged: their losses are those of torch.optim in float32 (``plain_apex``).

Each runs through an installed wheel or through ``python -m apex_npu run``, on the CPU or the simulated NPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from covering import by_turns
from devices import DEVICE, START_SCRIPT
from pipeline import synthetic
from pipeline.environments import ROOT, Environment, run
from pipeline.lifecycle import build

HERE = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("test_"))
# What float16 may stray from float32, as a part of the first loss. The GAN's two models chase each other; the learning
# rate of bert's warm-up continues while steps are skipped.
TOLERANCE = dict.fromkeys(SCRIPTS, 0.02) | {"gan": 0.1, "bert": 0.1}

NEEDS_EXTENSION = ("ema",)  # apex.contrib.combine_tensors does; the wheel is built without


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"^loss (\S+)$", done.stdout, flags=re.MULTILINE)]


def reference(name: str) -> list[float]:
    # On the same device: dropout draws from its generator.
    command = [sys.executable, *START_SCRIPT, HERE / f"{name}.py"]
    return losses(run(*command, cwd=HERE, PYTHONPATH=str(HERE / "plain_apex")))


def agree(name: str, ours: list[float], expected: list[float]) -> None:
    assert len(ours) == len(expected) >= 25
    assert ours[-1] < 0.5 * ours[0]
    # A dynamic loss scale starts too high: the first steps are skipped, and their loss comes again.
    skipped = next(step for step, loss in enumerate(ours) if abs(loss - ours[0]) > 1e-3 * ours[0]) - 1
    assert skipped < 12
    for one, other in zip(ours[skipped:], expected, strict=False):
        assert abs(one - other) <= TOLERANCE[name] * expected[0]


def losses_through_run(name: str) -> list[float]:
    command = [sys.executable, "-W", "ignore", *START_SCRIPT, "-m", "apex_npu", "run", HERE / f"{name}.py"]
    return losses(run(*command, cwd=HERE, PYTHONPATH=str(ROOT)))


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Environment:
    """An environment with a wheel: of the Apex at APEX_UPSTREAM, or of a stand-in for it."""
    folder = tmp_path_factory.mktemp("scripts")
    environment = Environment(folder / "an environment")
    upstream = os.environ.get("APEX_UPSTREAM")
    source = upstream or synthetic.write(folder / "upstream", synthetic.files("2025"))
    ref = ["--ref=2025"] if upstream else []
    environment.pip("install", build(environment, source, folder / "wheels", *ref, APEX_NPU_NO_EXT="1"))
    return environment


# The names that a script uses are served by the same modules either way; on the NPU each goes the other way.
WAYS = [("run",), ("wheel",)] if DEVICE.type == "cpu" else [("wheel",), ("run",)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), by_turns(SCRIPTS, WAYS))
def test_losses_are_those_of_plain_torch(name, way, request):
    if way == "run" or name in NEEDS_EXTENSION:
        found = losses_through_run(name)
    else:
        environment = request.getfixturevalue("installed")
        found = losses(environment.run("-W", "ignore", *START_SCRIPT, HERE / f"{name}.py"))
    agree(name, found, reference(name))
