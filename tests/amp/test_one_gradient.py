# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""16-bit parameters with remainders have one gradient, ``param.grad``, which is float32 between blocks."""

import pytest
import torch
from devices import DEVICE, needs_extension
from small_programs import WITH_MASTERS, backward, initialize
from torch import nn
from torch.func import functional_call

from apex_npu import optimizers

pytestmark = needs_extension

RULES = {
    "SGD": (optimizers.NpuFusedSGD, {"lr": 0.001, "momentum": 0.9, "weight_decay": 1e-4}),
    "Adam": (optimizers.NpuFusedAdam, {"lr": 1e-2, "weight_decay": 1e-2}),
    "AdamW": (optimizers.NpuFusedAdamW, {"lr": 1e-2, "amsgrad": True}),
    "AdamP": (optimizers.NpuFusedAdamP, {"lr": 1e-2, "weight_decay": 1e-2}),
    "BertAdam": (optimizers.NpuFusedBertAdam, {"lr": 1e-2}),
    "Adadelta": (optimizers.NpuFusedAdadelta, {}),
    "Lamb": (optimizers.NpuFusedLamb, {"lr": 1e-2}),
    "RMSprop": (optimizers.NpuFusedRMSprop, {"lr": 1e-3, "momentum": 0.9}),
    "RMSpropTF": (optimizers.NpuFusedRMSpropTF, {"lr": 1e-3, "momentum": 0.9}),
    "Muon": (optimizers.NpuFusedMuon, {"lr": 1e-2, "use_muon": "auto"}),
}
SCALE = 128.0
DTYPES = {"O2": torch.float16, "O5": torch.bfloat16}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5, bias=False)).to(DEVICE)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 9, generator=generator).to(DEVICE), torch.randn(8, 5, generator=generator).to(DEVICE)


def rounded(value, dtype):
    """To nearest; halves of the last bit of bfloat16 away from zero, since int16 has no place for the other way."""
    if dtype == torch.float16:
        return value.detach().to(dtype)
    return ((value.detach().view(torch.int32).to(torch.int64) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def float32_masters_by_hand(level, cls, arguments, steps, blocks, max_norm):
    """Mixed precision as Micikevicius et al. describe it, arXiv:1710.03740, section 3.1, without amp."""
    dtype, model = DTYPES[level], make_model()
    optimizer = cls(model.parameters(), **arguments)
    for step in range(steps):
        for block in range(blocks):
            x, y = batch(step * blocks + block)
            low = {name: rounded(p, dtype).requires_grad_() for name, p in model.named_parameters()}
            out = functional_call(model, low, (x.to(dtype),)).float()
            ((out - y).square().sum() * SCALE).backward()
            for name, p in model.named_parameters():
                grad = low[name].grad.float() / SCALE
                p.grad = grad if p.grad is None else p.grad + grad
        if max_norm is not None:
            optimizer.clip_optimizer_grad_norm_fused(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.pairwise
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("blocks", "max_norm"), [(1, None), (3, 1.0)])
def test_steps_are_those_of_float32_masters_by_hand(rule, level, blocks, max_norm):
    cls, arguments = RULES[rule]
    steps = 50
    wanted = float32_masters_by_hand(level, cls, arguments, steps, blocks, max_norm)
    model = make_model()
    optimizer = cls(model.parameters(), **arguments)
    model, optimizer = initialize(model, optimizer, level, loss_scale=SCALE, store_param_remainders=True)
    for step in range(steps):
        for block in range(blocks):
            x, y = batch(step * blocks + block)
            backward((model(x).float() - y).square().sum(), optimizer)
        assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(DTYPES[level], torch.float32)}
        if max_norm is not None:
            optimizer.clip_optimizer_grad_norm_fused(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    found = model.state_dict()
    for name, p in wanted.named_parameters():
        # Exact where remainders are, which is from 2⁻¹⁶ on in float16, and where sums are in one order.
        exact = DEVICE.type == "cpu" and float(p.abs().min()) >= 2.0**-16
        tolerance = 0.0 if exact else 2e-5
        torch.testing.assert_close(found[name], p.detach(), rtol=tolerance, atol=tolerance)
