# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Clipping in flat buffers against torch's, and torch.amp.GradScaler with fused optimizers."""

import math

import pytest
import torch
from optimizer_specs import SPECS
from small_programs import backward, initialize
from torch import nn

from apex_npu import amp
from apex_npu.optimizers import NpuFusedAdam, NpuFusedSGD

SHAPES = [(41, 123), (17,), (), (3, 2)]
NORMS = [1.0, 2.0, 3.5, math.inf, -math.inf, 0.0]


def make_params(grads=True):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    for p in params if grads else ():
        p.grad = torch.randn(p.shape, generator=generator)
        p.grad.view(-1)[0] = 0.0
    return params


@pytest.mark.parametrize("max_norm", [0.5, 1e4])
@pytest.mark.parametrize("absent", [(), (1,), range(1, len(SHAPES))], ids=["none", "one", "all but one"])
@pytest.mark.parametrize("norm_type", NORMS)
def test_same_as_torch(norm_type, absent, max_norm):
    ours, theirs = make_params(), make_params()
    for i in absent:
        ours[i].grad = theirs[i].grad = None
    optimizer = NpuFusedSGD(ours, lr=0.1)
    norm = optimizer.clip_optimizer_grad_norm_fused(max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(norm, expected)
    for p, q in zip(ours, theirs, strict=True):
        if q.grad is None:
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("norm_type", NORMS)
def test_gradients_without_elements_add_nothing(norm_type):
    ours, theirs = make_params(), make_params()
    empty = [nn.Parameter(torch.empty(shape)) for shape in ((0,), (3, 0))]
    for p in empty:
        p.grad = torch.empty_like(p)
    norm = NpuFusedSGD(empty, lr=0.1).clip_optimizer_grad_norm_fused(0.5, norm_type)
    torch.testing.assert_close(norm, torch.tensor(0.0))
    norm = NpuFusedSGD([*ours, *empty], lr=0.1).clip_optimizer_grad_norm_fused(0.5, norm_type)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 0.5, norm_type))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad):
    ours, theirs = make_params(), make_params()
    for params in (ours, theirs):
        params[0].grad[1, 1] = bad
    optimizer = NpuFusedSGD(ours, lr=0.1)
    before = [p.grad.clone() for p in ours]
    with pytest.raises(RuntimeError, match=r"order 2.0 for gradients is non-finite .* error_if_nonfinite=False"):
        optimizer.clip_optimizer_grad_norm_fused(1.0, error_if_nonfinite=True)
    for p, grad in zip(ours, before, strict=True):
        torch.testing.assert_close(p.grad, grad, equal_nan=True)
    norm = optimizer.clip_optimizer_grad_norm_fused(1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 1.0), equal_nan=True)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_before_the_first_backward():
    optimizer = NpuFusedSGD(make_params(grads=False), lr=0.1)
    assert optimizer.clip_optimizer_grad_norm_fused(1.0).item() == 0
    assert optimizer.clip_model_grad_norm_fused(1.0).item() == 0


@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_the_name_in_torch_npus_optimizers(level):
    model = nn.Linear(5, 7)
    optimizer = NpuFusedSGD(model.parameters(), lr=0.1)
    if level is not None:
        model, optimizer = initialize(model, optimizer, level, loss_scale=16.0)
        backward(model(torch.ones(3, 5)).float().square().sum(), optimizer)
    else:
        model(torch.ones(3, 5)).square().sum().backward()
    params = list(amp.master_params(optimizer))
    twins = [nn.Parameter(p.detach().to(p.grad.dtype, copy=True)) for p in params]
    for p, q in zip(params, twins, strict=True):
        q.grad = p.grad.clone()
    norm = optimizer.clip_grad_norm_fused_(0.25, 3)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twins, 0.25, 3))
    torch.testing.assert_close([p.grad for p in params], [q.grad for q in twins])
    assert optimizer.clip_model_grad_norm_fused(0.25, 3) <= 0.2505


def test_torchs_own_clipping_works_on_slots():
    ours, theirs = make_params(), make_params()
    optimizers = NpuFusedAdam(ours), torch.optim.Adam(theirs)
    for _ in range(3):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            for p in params:
                p.grad = torch.full_like(p, 3.0)
            nn.utils.clip_grad_norm_(params, 1.0)
            nn.utils.clip_grad_value_(params, 0.01)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_grad_scaler(spec, fused, unscale_first):
    """Scaled, overflowed, recovered: the same parameters as without a scaler."""
    takes_it = "fuse_grad_scaler" in spec.cls.__init__.__code__.co_varnames
    if fused and not takes_it:
        pytest.skip("NVIDIA's signatures have no such argument")
    options = {"lr": 0.01, **({"fuse_grad_scaler": fused} if takes_it else {})}
    ours, theirs = make_params(grads=False), make_params(grads=False)
    optimizer, reference = spec.cls(ours, **options), spec.reference(theirs, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused
    scales = []
    for step in range(8):
        overflow = step in (2, 5)
        optimizer.zero_grad()
        reference.zero_grad()
        for q in theirs:
            q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(step))
        scaler.scale(sum((p * q.grad).sum() for p, q in zip(ours, theirs, strict=True))).backward()
        if overflow:
            ours[0].grad[0, 0] = math.inf
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if not overflow:
            reference.step()
        scales.append(scaler.get_scale())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert scales == [1024, 1024, 512, 512, 512, 256, 256, 256]
