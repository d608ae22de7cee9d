# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that share memory are multiplied once: autograd leaves them so, and users may."""

import pytest
import torch
from devices import DEVICE
from small_programs import backward
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor  # a subclass that has no memory but that of two inside

from apex_npu import amp, optimizers
from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.optimizer_grads import unscale
from apex_npu.fusion import grad_slots

pytestmark = pytest.mark.host

SCALE = 64.0


@pytest.fixture(autouse=True, params=[None, 0], ids=["gathered", "left"])
def least_numel(request, monkeypatch):
    """Small gradients are multiplied on their way into slots, large ones where they are."""
    if request.param is not None:
        monkeypatch.setattr(grad_slots, "WRITTEN_NUMEL", request.param)


TRUE = torch.arange(1.0, 13.0)


def make(classes, level="O1", **options):
    """Two parameters of one size, both stepped by the one class given, or each by its own."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(4, 3))]).to(DEVICE)
    parts = [list(model)] if len(classes) == 1 else [[p] for p in model]
    made = [cls(part, lr=1.0) for cls, part in zip(classes, parts, strict=True)]
    options = {"loss_scale": SCALE, "verbosity": 0, **options}
    return amp.initialize(model, made, opt_level=level, **options)


def loss_of(model):
    a, b = model
    return ((a.view(-1) + b.view(-1)) * TRUE.to(a)).sum()


def assert_grads(model, expected):
    for p in model:
        torch.testing.assert_close(p.grad.flatten().cpu(), expected, rtol=0, atol=0)


TORCH, FUSED = torch.optim.SGD, optimizers.NpuFusedSGD
DYNAMIC = {"loss_scale": "dynamic", "dynamic_init_scale": SCALE}


def test_autograd_leaves_two_gradients_in_one_memory():
    """If it no longer does, the tests below check nothing."""
    model, _ = make([TORCH])
    loss_of(model).backward()
    assert model[0].grad.data_ptr() == model[1].grad.data_ptr()


@pytest.mark.pairwise
@pytest.mark.parametrize("classes", [[TORCH], [FUSED], [TORCH, TORCH], [TORCH, FUSED], [FUSED, TORCH]])
@pytest.mark.parametrize("options", [{}, {"fuse_unscale": True}, DYNAMIC, {"combine_grad": True}])
@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_each_is_unscaled_once(classes, level, options):
    model, made = make(classes, level, **options)
    for blocks in (1, 2):
        for _ in range(blocks):
            backward(loss_of(model), made)
        before = [p.detach().clone() for p in model]
        for optimizer in made:
            optimizer.step()
        for p, old in zip(model, before, strict=True):
            torch.testing.assert_close((old - p.detach()).flatten().cpu(), blocks * TRUE, rtol=0, atol=0)
        if "fuse_unscale" not in options:
            assert_grads(model, blocks * TRUE)
        for optimizer in made:
            optimizer.zero_grad()


@pytest.mark.parametrize("classes", [[TORCH], [TORCH, TORCH], [TORCH, FUSED], [FUSED, TORCH]])
def test_those_of_a_backward_before_the_block_are_scaled_up_once(classes):
    model, made = make(classes)
    loss_of(model).backward()
    backward(loss_of(model), made)
    assert_grads(model, 2 * TRUE)


def test_masters_take_them_over():
    model, made = make([TORCH], "O2")
    backward(loss_of(model).float(), made)
    assert_grads(amp.master_params(made[0]), TRUE)


def unscaled(grads):
    """What becomes of ``grads``, one for each of as many parameters."""
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    unscale([GradGroup(params)], SCALE, check=False)
    return [p.grad for p in params]


SHARING = {
    "one tensor twice": lambda whole: [whole, whole],
    "views that overlap in part": lambda whole: [whole[4:], whole, whole[:4], whole[2:6]],
    "one element, expanded": lambda whole: [whole[:1].expand(3), whole[:1], whole[:1].expand(2)],
    "other strides": lambda whole: [whole.view(2, 4).t(), whole.view(2, 4), whole.view(2, 4)[:, 1:3]],
}


@pytest.mark.parametrize("sharing", SHARING)
def test_gradients_of_one_memory(sharing):
    grads = SHARING[sharing](torch.full((8,), SCALE, device=DEVICE))
    for found, grad in zip(unscaled(grads), grads, strict=True):
        assert found.shape == grad.shape
        assert found.eq(1.0).all()


def test_a_subclass_without_memory_of_its_own_given_twice():
    grad = TwoTensor(torch.full((3,), SCALE, device=DEVICE), torch.full((3,), 2 * SCALE, device=DEVICE))
    for result in unscaled([grad, grad]):
        assert (result.a.tolist(), result.b.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_neighbours_in_one_buffer_stay_there():
    """As DistributedDataParallel's with gradient_as_bucket_view."""
    buffer = torch.full((10,), SCALE, device=DEVICE)
    parts = [buffer[:4], buffer[4:4], buffer[4:].view(2, 3)]
    result = unscaled(parts)
    assert all(grad is part for grad, part in zip(result, parts, strict=True))
    assert buffer.tolist() == [1.0] * 10
