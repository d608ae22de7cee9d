# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""16-bit parameters with remainders have one gradient, ``param.grad``, which is float32 between blocks."""

import pytest
import torch
from devices import DEVICE, needs_extension
from small_programs import WITH_MASTERS
from torch import nn
from torch.func import functional_call

from apex_npu import amp, optimizers

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


def start(level="O2", cls=optimizers.NpuFusedSGD, **options):
    model = make_model()
    arguments = {name: options.pop(name) for name in ("lr", "momentum", "weight_decay", "amsgrad") if name in options}
    optimizer = cls(model.parameters(), **{"lr": 0.1, **arguments})
    options = {"store_param_remainders": True, "loss_scale": SCALE, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)


def backward(model, optimizer, seed=0, **options):
    x, y = batch(seed)
    with amp.scale_loss((model(x).float() - y).square().sum(), optimizer, **options) as scaled:
        scaled.backward()


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
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, store_param_remainders=True, loss_scale=SCALE, verbosity=0
    )
    for step in range(steps):
        for block in range(blocks):
            backward(model, optimizer, step * blocks + block)
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


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_gradients_are_float32_and_all_that_reads_or_writes_them_means_these(level):
    model, optimizer = start(level)
    backward(model, optimizer)
    params = list(model.parameters())
    assert {p.dtype for p in params} == {DTYPES[level]}
    assert {p.grad.dtype for p in params} == {torch.float32}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    left = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in params]))
    assert float(norm) > 0.5
    torch.testing.assert_close(left, torch.tensor(0.5, device=DEVICE))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for p in params:
        p.grad.clamp_(-0.01, 0.01)
    grads = [p.grad.clone() for p in params]
    optimizer.step()
    for (name, value), grad in zip(model.state_dict().items(), grads, strict=True):
        torch.testing.assert_close(value, before[name] - 0.1 * grad, rtol=0, atol=1e-7)


@pytest.mark.parametrize("shape", [(), (1,), (0,)])
def test_small_parameters(shape):
    model = nn.Linear(3, 2).to(DEVICE)
    model.extra = nn.Parameter(torch.full(shape, 0.3, device=DEVICE))
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", store_param_remainders=True, verbosity=0, loss_scale=SCALE
    )
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(2, 3, device=DEVICE)).sum() + model.extra.float().sum(), optimizer) as s:
            s.backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)
    assert model.extra.grad.dtype == torch.float32
    torch.testing.assert_close(model.state_dict()["extra"], torch.full(shape, 0.1, device=DEVICE), rtol=0, atol=1e-3)
