# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``find_overflow`` names the kind, the module, the operator and the line of planted faults, and of nothing else."""

import pytest
import torch
from debug import planted, planted_more
from devices import SIMULATOR, require

from apex_npu import amp, optimizers

SETTINGS = {
    "torch.optim": (torch.optim.SGD, {}),
    "fused": (optimizers.NpuFusedSGD, {}),
    "combine_grad": (optimizers.NpuFusedAdam, {"combine_grad": True}),
    "fuse_unscale": (optimizers.NpuFusedAdam, {"combine_grad": True, "fuse_unscale": True}),
}
# One setting of each fault is quick.
QUICK = {("O1", "fuse_unscale"), ("O2", "torch.optim")}
CASES = [
    pytest.param(
        fault,
        level,
        *SETTINGS[name],
        id=f"{fault.name}-{level}-{name}",
        marks=[] if (level, name) in QUICK else [pytest.mark.slow],
    )
    for fault in planted.FAULTS
    for level in fault.levels
    for name in SETTINGS
]


@pytest.mark.parametrize(("fault", "level", "optimizer", "options"), CASES)
def test_planted(fault, level, optimizer, options):
    model, made, _ = planted.set_up(fault, level, optimizer, **options)
    with amp.debug.find_overflow(model) as found:
        planted.iterate(fault, model, made)
    expected = fault.at(level)
    assert [{key: getattr(cause, key) for key in expected} for cause in found.causes] == [expected], str(found)
    assert found.causes[0].tensor == fault.tensor or fault.tensor is None


@pytest.mark.parametrize(
    "level", [pytest.param("O1", marks=pytest.mark.slow), "O2", pytest.param("O3", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("fault", planted_more.FAULTS, ids=lambda fault: fault.name)
def test_planted_elsewhere(fault, level):
    if level not in fault.levels:
        pytest.skip("no such fault at this level")
    model, made, _ = planted.set_up(fault, level, torch.optim.SGD)
    with amp.debug.find_overflow(model) as found:
        planted.iterate(fault, model, made)
    expected = fault.at(level, planted_more.MARKED)
    assert [{key: getattr(cause, key) for key in expected} for cause in found.causes] == [expected], str(found)
    assert found.causes[0].tensor == fault.tensor or fault.tensor is None


@pytest.fixture
def saturating_chip():
    if SIMULATOR is None:
        pytest.skip("a chip that saturates is simulated on the npu")
    require("configurable_chip")
    SIMULATOR.configure(saturate="fp16")
    yield
    SIMULATOR.configure()


@pytest.mark.parametrize(("fault", "level", "optimizer", "options"), CASES)
def test_planted_on_a_chip_that_saturates(fault, level, optimizer, options, saturating_chip):
    model, made, _ = planted.set_up(fault, level, optimizer, **options)
    with amp.debug.find_overflow(model) as found:
        planted.iterate(fault, model, made)
    expected = fault.at(level)
    assert [{key: getattr(cause, key) for key in expected} for cause in found.causes] == [expected], str(found)
