# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that share memory, have a graph, or whose ``.data`` is replaced: the results of plain torch."""

import pytest
import torch
from devices import DEVICE
from small_programs import backward, initialize
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.fusion import grad_slots


@pytest.fixture(autouse=True)
def large_is_small(monkeypatch):
    monkeypatch.setattr(grad_slots, "WRITTEN_NUMEL", 16)


@pytest.mark.parametrize("numel", [4, 64], ids=["small", "large"])
def test_replaced_data_of_a_gradient_is_stepped(numel):
    ours, theirs = (nn.Parameter(torch.ones(numel, device=DEVICE)) for _ in range(2))
    one, other = optimizers.NpuFusedSGD([ours], lr=0.5), torch.optim.SGD([theirs], lr=0.5)
    for p, optimizer in ((ours, one), (theirs, other)):
        p.grad = torch.ones(numel, device=DEVICE)
        optimizer.step()
        for factor in (0.5, 0.25):
            optimizer.zero_grad(set_to_none=False)
            (2 * p).sum().backward()
            p.grad.data = p.grad.data * factor
            optimizer.step()
        p.grad.mul_(3)  # in its slot again
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("together", [True, False], ids=["one group", "two groups"])
def test_gradients_that_autograd_left_in_one_memory_are_unscaled_and_clipped_once(together):
    a, b = (nn.Parameter(torch.full((8, 8), value, device=DEVICE)) for value in (1.0, 2.0))
    model = nn.ParameterList([a, b])
    groups = [{"params": [a, b]}] if together else [{"params": [a]}, {"params": [b]}]
    model, optimizer = initialize(model, optimizers.NpuFusedSGD(groups, lr=1.0), "O1", loss_scale=128.0)
    weight = torch.arange(64.0, device=DEVICE)
    backward(((a.view(-1) + b.view(-1)) * weight).sum(), optimizer)
    for p in (a, b):
        torch.testing.assert_close(p.grad.view(-1), weight, rtol=0, atol=0)
    norm = optimizer.clip_optimizer_grad_norm_fused(1.0)
    torch.testing.assert_close(norm, weight.norm() * 2**0.5)
    torch.testing.assert_close((a.grad.square().sum() + b.grad.square().sum()).sqrt(), torch.ones((), device=DEVICE))


@pytest.mark.parametrize("numel", [4, 64], ids=["small", "large"])
def test_unscaled_gradients_have_no_graph_that_is_still_scaled(numel):
    p = nn.Parameter(torch.full((numel,), 2.0, device=DEVICE))
    _, optimizer = initialize(nn.ParameterList([p]), optimizers.NpuFusedSGD([p], lr=1.0), "O1")
    with amp.scale_loss((p**3).sum(), optimizer) as scaled_loss:
        scaled_loss.backward(create_graph=True)
    torch.testing.assert_close(p.grad, torch.full_like(p, 12.0), rtol=0, atol=0)
    assert not p.grad.requires_grad


@pytest.mark.parametrize("cls", [optimizers.NpuFusedSGD, torch.optim.SGD])
def test_gradients_that_change_places(cls):
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    optimizer = cls(params, lr=1.0)
    for p, value in zip(params, (1.0, 2.0), strict=True):
        p.grad = torch.full((3,), value)
    optimizer.step()
    params[0].grad, params[1].grad = params[1].grad, params[0].grad
    optimizer.step()
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full((3,), -3.0), rtol=0, atol=0)


@pytest.mark.parametrize(
    "touch",
    [
        pytest.param(lambda p: setattr(p.grad, "data", p.grad.data * 2), id="other memory of a gradient"),
        pytest.param(lambda p: setattr(p, "grad", torch.ones_like(p)), id="another gradient"),
        pytest.param(lambda p: setattr(p, "grad", None), id="no gradient"),
        pytest.param(lambda p: setattr(p, "data", p.data.clone()), id="other memory of a parameter"),
        pytest.param(lambda p: None, id="nothing"),
    ],
)
def test_zeros_are_written_where_gradients_are(touch):
    params = [nn.Parameter(torch.ones(numel, device=DEVICE)) for numel in (4, 64, 4)]
    optimizer = optimizers.NpuFusedSGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    touch(params[0])
    there = [p.grad for p in params]
    optimizer.zero_grad(set_to_none=False)
    for p, grad in zip(params, there, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or not p.grad.any()
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    for p, lr in zip(params, (1.0, 1.0, 0.5), strict=True):
        torch.testing.assert_close(p, torch.full_like(p, 1 - 3 * lr), rtol=0, atol=0)


def test_zeros_are_written_to_gradients_of_parameters_that_are_not_fused_yet():
    first, frozen, added = (nn.Parameter(torch.ones(4, device=DEVICE)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = optimizers.NpuFusedSGD([first, frozen], lr=1.0)
    first.grad = torch.ones_like(first)
    optimizer.step()
    frozen.requires_grad_(True).grad = torch.ones_like(frozen)
    added.grad = torch.ones_like(added)
    optimizer.add_param_group({"params": [added]})
    optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in (first, frozen, added))


def test_a_gradient_transposed_in_its_own_memory_is_stepped_as_it_reads():
    p = nn.Parameter(torch.zeros(3, 3, device=DEVICE))
    optimizer = optimizers.NpuFusedSGD([p], lr=1.0)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    p.grad.copy_(torch.arange(9.0, device=DEVICE).view(3, 3))
    p.grad.data = p.grad.data.t()
    optimizer.step()
    torch.testing.assert_close(p.detach(), -torch.arange(9.0, device=DEVICE).view(3, 3).t(), rtol=0, atol=0)
