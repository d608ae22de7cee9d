# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``find_overflow`` names the kind, the module, the operator and the line of planted faults, and of nothing else."""

import importlib
import os
from pathlib import Path

import pytest
import torch
from debug import planted, planted_more
from devices import DEVICE, SIMULATOR, require

from apex_npu import amp, optimizers
from apex_npu.debug.watching import places

SETTINGS = {
    "torch.optim": (torch.optim.SGD, {}),
    "fused": (optimizers.NpuFusedSGD, {}),
    "combine_grad": (optimizers.NpuFusedAdam, {"combine_grad": True}),
    "fuse_unscale": (optimizers.NpuFusedAdam, {"combine_grad": True, "fuse_unscale": True}),
}
# One setting of each fault is quick. The others repeat it.
QUICK = {("O1", "fuse_unscale"), ("O2", "torch.optim")}
CASES = [
    pytest.param(
        fault,
        level,
        *SETTINGS[name],
        id=f"{fault.name}-{level}-{name}",
        marks=[] if (level, name) in QUICK else [pytest.mark.sweep],
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
    fault.check(found, level)


@pytest.mark.parametrize(
    "level", [pytest.param("O1", marks=pytest.mark.slow), "O2", pytest.param("O3", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("fault", planted_more.FAULTS, ids=lambda fault: fault.name)
def test_planted_elsewhere(fault, level):
    model, made, _ = planted.set_up(fault, level, torch.optim.SGD)
    with amp.debug.find_overflow(model) as found:
        planted.iterate(fault, model, made)
    fault.check(found, level, planted_more.MARKED)


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


def normalized(x):
    return torch.nn.functional.normalize(x)  # fault: normalize


def standardized(x):
    variance = x.var(-1, keepdim=True, unbiased=False)
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-12)  # fault: standardize


def by_norm(x):
    return x / (x * x).sum(-1, keepdim=True).sqrt()  # fault: by_norm


@pytest.mark.parametrize(
    ("function", "weight", "what", "mark"),
    [
        (normalized, 0.0, "1e-12 (min of clamp_min) is 0 in float16", "normalize"),
        (standardized, 0.0, "1e-12 (other of add) is 0 in float16", "standardize"),
        (by_norm, 1e-6, "the result of mul, at most 6.6e-11, is 0 in float16", "by_norm"),
    ],
)
def test_a_divisor_that_float16_rounds_to_zero(function, weight, what, mark):
    layer = torch.nn.Linear(8, 8, bias=False).to(DEVICE, torch.float16)
    torch.nn.init.constant_(layer.weight, weight)
    with amp.debug.find_overflow(layer) as found:
        function(layer(torch.ones(4, 8, device=DEVICE, dtype=torch.float16))).float().sum().backward()
    cause = found.causes[0]
    assert cause.kind == "underflow"
    assert what in cause.why
    assert f"test_find_overflow.py:{planted.marked_lines(__file__)[mark]}" in cause.why
    assert "an eps that float16 holds, such as 1e-4" in cause.advice


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_divisor_that_is_zero_by_itself_is_mathematics(dtype):
    layer = torch.nn.Linear(8, 8, bias=False).to(DEVICE, dtype)
    torch.nn.init.zeros_(layer.weight)
    with amp.debug.find_overflow(layer) as found:
        by_norm(layer(torch.ones(4, 8, device=DEVICE, dtype=dtype))).float().sum().backward()
    assert found.causes[0].kind == "math"


def test_the_line_of_the_script_beside_that_of_a_package(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "_PACKAGES", (*places._PACKAGES, f"{tmp_path}{os.sep}"))
    (tmp_path / "a_package.py").write_text("def root(x):\n    return (x * 0).log()\n")
    monkeypatch.syspath_prepend(tmp_path)
    root = importlib.import_module("a_package").root
    layer = torch.nn.Linear(8, 1).to(DEVICE)
    with amp.debug.find_overflow(layer) as found:
        root(layer(torch.ones(4, 8, device=DEVICE))).sum().backward()  # fault: package
    line = planted.marked_lines(__file__)["package"]
    place = found.causes[0].place
    assert "a_package.py:2, called from " in place
    assert place.endswith(f"{Path(__file__).name}:{line}")
    assert f"line        {place}  return (x * 0).log()" in str(found)


@pytest.mark.parametrize("columns", [60, 100])
def test_lines_fit_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    layer = torch.nn.Linear(8, 1).to(DEVICE)
    with amp.debug.find_overflow(layer) as found:
        (layer(torch.ones(4, 8, device=DEVICE)) * 0).log().sum().backward()
    lines = str(found).splitlines()
    assert max(len(line) for line in lines if "/" not in line.split()[-1]) <= columns
    assert any(line.startswith(" " * 12) for line in lines)
