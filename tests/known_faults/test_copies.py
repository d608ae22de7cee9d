# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Moving averages, FusedEMA's and those that hosts make of a deep copy, follow masters.

A model that is copied alone is float32, with the masters' values and without casts.
"""

import copy
import pickle

import pytest
import torch
from devices import DEVICE
from known_faults.common import (
    CASTING,
    WITH_MASTERS,
    Weights,
    assert_values,
    initialize,
    kinds,
    known_fault,
    levels,
    levels_where,
    start,
    train_step,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from apex_npu import amp, optimizers

ROUNDED = "averages are of the rounded weights, not of the masters"
LOW = "a copy stays in half precision, with rounded weights"
NO_MOVE = "what is written into a copy's state_dict() is written into a float32 copy, and lost"
CASTS = "a copy keeps its model's casts"
EXACT = 1.0 + 2.0**-20  # no half, and no bfloat16
STEP = 2.0**-18


def trained(level, kind="fused", steps=1):
    model, optimizer = start(Weights(EXACT), kind=kind, level=level, lr=STEP)
    for _ in range(steps):
        train_step(model, optimizer, (1.0, 1.0, 1.0))
    return model, optimizer


@known_fault(ROUNDED)
@levels(WITH_MASTERS)
def test_fused_ema_starts_at_the_masters(level):
    model, _ = trained(level, steps=0)
    assert_values(optimizers.FusedEMA(model).state_dict()["averages"].values(), EXACT)


@known_fault(ROUNDED)
@levels(WITH_MASTERS)
@kinds(("torch", "fused"))
def test_fused_ema_averages_masters(kind, level):
    model, optimizer = trained(level, kind)
    ema = optimizers.FusedEMA(model, decay=0.5)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    ema.update()
    assert_values(ema.state_dict()["averages"].values(), EXACT - 1.5 * STEP)


@known_fault(ROUNDED)
@levels(WITH_MASTERS)
def test_what_is_saved_while_averages_are_swapped_in_is_exact(level):
    model, _ = trained(level)
    ema = optimizers.FusedEMA(model, decay=0.5)
    ema.load_state_dict({"decay": 0.5, "averages": {"w.0": torch.full((3,), EXACT + STEP)}})
    with ema.swapped():
        saved = model.state_dict()["w.0"].clone()
    assert_values([saved], EXACT + STEP)


@levels(("O0", *CASTING, *WITH_MASTERS))
def test_swapping_gives_the_weights_back(level):
    model, optimizer = trained(level)
    with optimizers.FusedEMA(model).swapped():
        pass
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    assert_values(model.state_dict().values(), EXACT - 2 * STEP)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}
copies = pytest.mark.parametrize("how", COPIES)


@known_fault(LOW)
@levels(WITH_MASTERS)
@copies
def test_a_copy_of_a_model_alone_has_the_values_of_the_masters(how, level):
    model, _ = trained(level)
    twin = COPIES[how](model)
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    assert_values(twin.parameters(), EXACT - STEP)


@known_fault(CASTS)
@levels(WITH_MASTERS)
@pytest.mark.parametrize("dtype", [torch.float32, "low"])
@copies
def test_a_copy_of_a_model_alone_computes_in_float32(how, dtype, level):
    model = nn.Linear(3, 3).to(DEVICE)
    x = torch.rand(4, 3, device=DEVICE) + 2.0**-12
    expected = model(x)
    model, _ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    if dtype == "low":
        x = x.to(model.weight.dtype)
        expected = torch.nn.functional.linear(x.float(), *(model.state_dict()[n] for n in ("weight", "bias")))
    found = COPIES[how](model)(x)
    torch.testing.assert_close(found, expected)


@known_fault(CASTS)
@levels(WITH_MASTERS)
def test_a_copy_of_a_model_alone_has_no_hooks_of_amp(level):
    model, _ = trained(level)
    twin = copy.deepcopy(model)
    assert "forward" not in vars(twin)
    assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks for m in twin.modules())


@known_fault(NO_MOVE)
@levels(WITH_MASTERS)
def test_an_average_written_through_the_state_dict_of_a_copy_moves(level):
    model, optimizer = trained(level)
    twin = copy.deepcopy(model)
    for _ in range(2):
        train_step(model, optimizer, (1.0, 1.0, 1.0))
        with torch.no_grad():
            for mine, value in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
                mine.copy_(0.5 * mine + 0.5 * value)
    # From 1 step: half way to 2, and from there half way to 3.
    assert_values(twin.state_dict().values(), EXACT - 2.25 * STEP)


def average_of_steps(level, **options):
    """Over two weights between which the model's dtype has nothing, and that dtype's eps."""
    eps = torch.finfo({"O2": torch.float16}.get(level, torch.bfloat16)).eps
    model, optimizer = start(Weights(1.0), level=level, lr=eps)
    average = AveragedModel(model, **options)
    for _ in range(2):
        average.update_parameters(model)
        train_step(model, optimizer, (-1.0, -1.0, -1.0))
    return average.module.state_dict()["w.0"], eps


MEANS = {"mean": {}, "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}}


@levels_where(("O0", *CASTING), WITH_MASTERS, LOW)
@pytest.mark.parametrize("use", MEANS)
def test_torchs_averaged_model_is_float32(use, level):
    average, eps = average_of_steps(level, **MEANS[use])
    assert_values([average], 1.0 + 0.5 * eps)


@levels(WITH_MASTERS)
@copies
def test_a_model_copied_together_with_its_optimizer_stays_at_its_level(how, level):
    model, optimizer = trained(level)
    twin, other = COPIES[how]((model, optimizer))
    assert [p.dtype for p in twin.parameters()] == [p.dtype for p in model.parameters()]
    train_step(twin, other, (1.0, 1.0, 1.0))
    assert_values(amp.master_params(other), EXACT - 2 * STEP)
