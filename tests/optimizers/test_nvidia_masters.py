# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``FusedAdam(master_weights=True)``: low-precision parameters whose float32 masters are state."""

import copy

import lockstep
import pytest
import torch
from devices import DEVICE
from lockstep import set_grads
from small_programs import backward
from torch import nn

from apex_npu import amp
from apex_npu.optimizers import FusedAdam

pytestmark = pytest.mark.device
SHAPES = [(40, 30), (7,), (), (300, 20)]
LOW = [torch.float16, torch.bfloat16]
MASTERED = ["step", "exp_avg", "exp_avg_sq", "master_param"]


def make_params(dtype):
    return lockstep.make_params(SHAPES, dtype)


def train(params, optimizer, seeds):
    for seed in seeds:
        set_grads(params, seed)
        optimizer.step()
        optimizer.zero_grad()


def masters_of(optimizer, params):
    return [optimizer.state[p]["master_param"] for p in params]


def assert_rounded(params, masters):
    for p, master in zip(params, masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(p, master.to(p.dtype))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_masters_go_the_way_of_float32_parameters(dtype, adam_w_mode):
    options = {"lr": 1e-4, "weight_decay": 0.1}  # steps far below what the parameters can show
    params = make_params(dtype)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = FusedAdam(params, adam_w_mode=adam_w_mode, master_weights=True, **options)
    reference = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(wide, **options)
    for seed in range(50):
        set_grads(params, seed)
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    assert_rounded(params, masters_of(optimizer, params))
    for master, q in zip(masters_of(optimizer, params), wide, strict=True):
        torch.testing.assert_close(master, q.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", LOW)
def test_weights_that_a_script_sets_become_masters(dtype):
    model = nn.ParameterList(make_params(dtype))
    optimizer = FusedAdam(model.parameters(), lr=0.01, master_weights=True)
    saved = copy.deepcopy(model.state_dict())
    train(list(model), optimizer, range(3))
    fresh = nn.ParameterList(make_params(dtype))
    for set_weights in (
        lambda: model.load_state_dict(saved),
        lambda: [p.data.copy_(q) for p, q in zip(model, fresh, strict=True)],
        lambda: [setattr(p, "data", q.data.clone()) for p, q in zip(model, fresh, strict=True)],
    ):
        set_weights()
        start = [p.detach().float() for p in model]
        before = [m.clone() for m in masters_of(optimizer, model)]
        set_grads(model, 4, scale=0.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # so that only what the step begins from is seen
        optimizer.step()
        for master, value, old in zip(masters_of(optimizer, model), start, before, strict=True):
            # What had not been moved by the training is what its master rounds to still.
            expected = torch.where(old.to(dtype) == value.to(dtype), old, value)
            assert torch.equal(master, expected)
        assert_rounded(model, masters_of(optimizer, model))
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        train(list(model), optimizer, range(5, 7))


@pytest.mark.parametrize("dtype", LOW)
def test_a_loaded_state_goes_on_bit_for_bit_and_masters_may_be_missing(dtype):
    params, others, third = (make_params(dtype) for _ in range(3))
    optimizer = FusedAdam(params, lr=1e-3, master_weights=True)
    train(params, optimizer, range(3))
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    train(params, optimizer, range(3, 6))

    other = FusedAdam(others, lr=0.5, master_weights=True)
    with torch.no_grad():
        torch._foreach_copy_(others, weights)
    other.load_state_dict(saved)
    train(others, other, range(3, 6))
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, other.state[q][name])

    for entry in saved["state"].values():
        del entry["master_param"]  # as NVIDIA saves it
    for group in saved["param_groups"]:
        del group["master_weights"]
    theirs = FusedAdam(third, lr=0.5, master_weights=True)
    with torch.no_grad():
        torch._foreach_copy_(third, weights)
    theirs.load_state_dict(saved)
    set_grads(third, 3)
    theirs.param_groups[0]["lr"] = 0.0
    theirs.step()
    for master, weight in zip(masters_of(theirs, third), weights, strict=True):
        assert torch.equal(master, weight.float())


def test_parameters_of_both_kinds_in_one_group():
    low, wide = make_params(torch.bfloat16), make_params(torch.float32)
    twins = [nn.Parameter(p.detach().clone()) for p in wide]
    optimizer = FusedAdam([*low, *wide], lr=0.01, master_weights=True)
    plain = FusedAdam(twins, lr=0.01)
    train([*low, *wide], optimizer, range(3))
    for seed in range(3):
        set_grads([*low, *twins], seed)
        plain.step()
    torch.testing.assert_close(wide, twins, rtol=0, atol=0)
    assert_rounded([*low, *wide], masters_of(optimizer, [*low, *wide]))


def test_there_are_masters_only_of_what_is_low_and_trained():
    wide = make_params(torch.float32)
    optimizer = FusedAdam(wide, master_weights=True)
    train(wide, optimizer, range(1))
    assert all(list(entry) == MASTERED[:3] for entry in optimizer.state.values())
    low = make_params(torch.float16)
    low[1].requires_grad_(False)
    frozen = low[1].detach().clone()
    optimizer = FusedAdam(low, lr=0.1, master_weights=True)
    trained = [low[0], *low[2:]]
    train(trained, optimizer, range(2))
    assert all(list(optimizer.state[p]) == MASTERED for p in trained)
    assert low[1] not in optimizer.state
    assert torch.equal(low[1], frozen)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_amp_keeps_the_masters(level):
    model = nn.Linear(3, 2).to(DEVICE)
    optimizer = FusedAdam(model.parameters(), lr=0.01, master_weights=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    backward(model(torch.ones(2, 3, device=DEVICE)).float().sum(), optimizer)
    optimizer.step()
    # In its state they are remainders; on an NPU they are beside it.
    assert all(set(entry) <= set(MASTERED) for entry in optimizer.state.values())
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())


def test_gradients_that_are_scaled_are_divided_in_the_step():
    ends = []
    for scale in (1.0, 1024.0):
        params = make_params(torch.float16)
        optimizer = FusedAdam(params, lr=0.01, eps=1e-3, master_weights=True)
        set_grads(params, 0, scale)
        optimizer.grad_scale = torch.full((1,), scale, device=DEVICE)
        optimizer.step()
        ends.append(masters_of(optimizer, params))
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)
