# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""NVIDIA's FusedMixedPrecisionLamb: float32 masters, tensors in its groups, and its GradScaler."""

import copy
import math
import pickle

import lockstep
import pytest
import reference_optimizers as reference
import torch
from devices import DEVICE, needs
from torch import nn

from apex_npu.optimizers import FusedLAMB, FusedMixedPrecisionLamb

pytestmark = pytest.mark.device
SHAPES = [(40, 30), (7,), (), (30, 20), (0,), (1,)]
LOW = [torch.float16, torch.bfloat16]
low = pytest.mark.parametrize("dtype", LOW, ids=str)


def make_params(dtype):
    return lockstep.make_params(SHAPES, dtype)


def set_grads(params, seed, scale=1.0):
    lockstep.set_grads(params, seed, 0.125 * scale)


def train(optimizer, params, seeds):
    for seed in seeds:
        set_grads(params, seed)
        optimizer.step()


def masters_of(optimizer, params):
    return [optimizer.state[p]["master_param"] for p in params]


@low
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "use_nvlamb": True},
        {"grad_averaging": False, "max_grad_norm": 0.1},
        {"adam_w_mode": False, "bias_correction": False},
        {"adam_w_mode": False, "betas": (0.6, 0.9), "max_grad_norm": 1e3},
    ],
    ids=str,
)
def test_masters_go_the_way_of_the_rule_in_float64(options, dtype):
    params = make_params(dtype)
    wide = [nn.Parameter(p.detach().cpu().double()) for p in params]
    ours = FusedMixedPrecisionLamb(params, lr=1e-3, reduced_precision_dtype=dtype, **options)
    theirs = reference.NvidiaLamb(wide, lr=1e-3, **options)
    for seed in range(6):
        set_grads(params, seed)
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.cpu().double()
        ours.step()
        theirs.step()
    for p, q, master in zip(params, wide, masters_of(ours, params), strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(p, master.to(dtype))
        torch.testing.assert_close(master.cpu().double(), q.detach(), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "int8"], ids=str)
@low
def test_masters_are_what_fused_lamb_steps(dtype, state_dtype):
    """Whatever the states are kept in."""
    params = make_params(dtype)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    ours = FusedMixedPrecisionLamb(params, lr=2**-7, reduced_precision_dtype=dtype, state_dtype=state_dtype)
    theirs = FusedLAMB(wide, lr=2**-7, state_dtype=state_dtype)
    for seed in range(4):
        set_grads(params, seed)
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    # Where counts are on the device, so are the corrections, in float32.
    torch.testing.assert_close(masters_of(ours, params), [q.detach() for q in wide], rtol=1e-6, atol=1e-6)


def test_only_parameters_of_the_reduced_dtype_have_masters():
    params = [*make_params(torch.float32), *make_params(torch.bfloat16), *make_params(torch.float16)]
    optimizer = FusedMixedPrecisionLamb([{"params": params[i::3]} for i in range(3)])
    optimizer.reduced_precision_dtype = torch.bfloat16  # as NVIDIA's tests set it
    train(optimizer, params, range(3))
    for group in optimizer.param_groups:
        mastered = any(p.dtype == torch.bfloat16 for p in group["params"])
        for p in group["params"]:
            assert ("master_param" in optimizer.state[p]) is mastered
            if mastered:
                assert torch.equal(optimizer.state[p]["master_param"].to(p.dtype), p)


def test_rate_and_count_are_tensors_of_each_group():
    first, second = make_params(torch.float32), make_params(torch.float32)
    optimizer = FusedMixedPrecisionLamb([{"params": first}, {"params": second, "lr": 0.5}], lr=0.25)
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.25, 0.5]
    train(optimizer, [*first, *second], range(2))
    for group in optimizer.param_groups:
        assert (group["lr"].dtype, group["lr"].device) == (torch.float32, first[0].device)
        assert (group["step"].dtype, group["step"].shape, group["step"].item()) == (torch.int32, (1,), 2)
        assert group["step"].device == first[0].device
    optimizer.param_groups[0]["lr"].fill_(0.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.0, 0.25]
    before = [p.detach().clone() for p in first]
    train(optimizer, [*first, *second], range(1))
    assert all(map(torch.equal, first, before))


def test_a_first_count_corrects_less():
    """At count t: m̂ = (1 − β₁) g / (1 − β₁ᵗ), and without decay p ← p − lr · m̂ / (sqrt(v̂) + eps)."""
    param = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = FusedMixedPrecisionLamb([param], lr=0.5, step=4, betas=(0.5, 0.75), weight_decay=0.0, eps=0.0)
    param.grad = torch.full_like(param, 0.25)
    optimizer.step()
    step = (0.5 / (1 - 0.5**5)) / math.sqrt(0.25 / (1 - 0.75**5))
    torch.testing.assert_close(param.detach().cpu(), torch.full((3,), 1 - 0.5 * step))
    assert optimizer.param_groups[0]["step"].item() == 5
    twin = nn.Parameter(param.detach().clone())
    other = FusedMixedPrecisionLamb([twin], lr=0.5, step=9, betas=(0.5, 0.75), weight_decay=0.0, eps=0.0)
    other.load_state_dict(optimizer.state_dict())
    for p, o in ((param, optimizer), (twin, other)):
        p.grad = torch.full_like(p, -0.125)
        o.step()
    assert torch.equal(param, twin)
    assert other.param_groups[0]["step"].item() == 6


@needs("inf")
@pytest.mark.parametrize("by_scaler", [False, True])
@low
def test_a_grad_scaler_is_heeded(dtype, by_scaler):
    """``optimizer.step(grad_scaler=scaler)``, as NVIDIA's takes it, and ``scaler.step(optimizer)``."""
    params, twins = make_params(dtype), make_params(dtype)
    optimizer, plain = (FusedMixedPrecisionLamb(p, lr=1e-2, reduced_precision_dtype=dtype) for p in (params, twins))
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=64.0, growth_interval=100)
    for seed in range(4):
        scaler.scale(torch.zeros((), device=DEVICE))  # the scale is made at its first use
        set_grads(params, seed, 64.0)
        if seed == 2:
            params[0].grad[0, 0] = math.inf
        if by_scaler:
            scaler.step(optimizer)
        else:
            optimizer.step(grad_scaler=scaler)
        scaler.update()
        if seed == 2:
            assert scaler.get_scale() == 32.0
            scaler.update(64.0)
        else:
            train(plain, twins, [seed])
    torch.testing.assert_close(params, twins)
    torch.testing.assert_close(masters_of(optimizer, params), masters_of(plain, twins))
    assert optimizer.param_groups[0]["step"].item() == 3


@pytest.mark.parametrize("copied", ["state dict", "NVIDIA's", "deepcopy", "pickle"])
@low
def test_training_goes_on_from_a_copy(dtype, copied):
    params = make_params(dtype)
    optimizer = FusedMixedPrecisionLamb(params, lr=1e-2, reduced_precision_dtype=dtype)
    train(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    if copied == "NVIDIA's":
        for entry in saved["state"].values():  # its masters are made of the parameters again
            del entry["step"], entry["master_param"]
        del saved["param_groups"][0]["step_offset"]
        for p in params:
            optimizer.state[p]["master_param"].copy_(p.detach())
    if copied in ("state dict", "NVIDIA's"):
        twins = [nn.Parameter(p.detach().clone()) for p in params]
        other = FusedMixedPrecisionLamb(twins, lr=0.5, step=7, reduced_precision_dtype=dtype)
        other.load_state_dict(saved)
        assert saved["param_groups"][0]["step"].item() == 3
    else:
        other = copy.deepcopy(optimizer) if copied == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        twins = other.param_groups[0]["params"]
    train(optimizer, params, range(3, 6))
    train(other, twins, range(3, 6))
    assert all(map(torch.equal, params, twins))
    assert all(map(torch.equal, masters_of(optimizer, params), masters_of(other, twins)))
    assert other.param_groups[0]["step"].item() == 6
