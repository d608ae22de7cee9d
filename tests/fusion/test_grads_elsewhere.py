# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Large gradients stay where autograd left them; only the speed differs."""

import gc
import weakref

import lockstep
import numpy as np
import pytest
import torch
from devices import needs_extension
from lockstep import assert_equal_params, set_grads
from torch import nn

from apex_npu import optimizers
from apex_npu.fusion import FlatGrads, fuse, grad_slots, storage
from apex_npu.fusion.grad_slots import InPlace
from apex_npu.ops.grad_lists import is_grad_list

pytestmark = needs_extension

SHAPES = [(3,), (40, 30), (7, 5), (20, 60), (2,)]
LARGE = [1, 3]


@pytest.fixture(autouse=True)
def large_is_small(monkeypatch):
    monkeypatch.setattr(grad_slots, "WRITTEN_NUMEL", 1_000)


def make_params(seed=0):
    return lockstep.make_params(SHAPES, seed=seed, device="cpu")


def test_which_stay():
    params = make_params()
    grads = fuse(params)[0].grads
    set_grads(params, 1)
    before = [p.grad for p in params]
    states = grads.gather(in_place=InPlace.WRITE)
    assert [i for i, state in enumerate(states) if state == grad_slots.ELSEWHERE] == LARGE
    assert [i for i, (p, g) in enumerate(zip(params, before, strict=True)) if p.grad is g] == LARGE
    operands = grads.operands(InPlace.WRITE)
    assert len(operands) == 1
    assert is_grad_list(operands[0])
    assert [i for i, (p, g) in enumerate(zip(params, before, strict=True)) if p.grad is g] == LARGE
    assert grads.gather().count(grad_slots.IN_BUFFER) == len(params)  # requests for one buffer are served
    torch.testing.assert_close(params[1].grad, before[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda p: p.grad.t().contiguous().t(), id="other strides"),
        pytest.param(lambda p: torch.ones(()).expand(p.shape), id="one element for all"),
        pytest.param(lambda p: p.detach(), id="the parameter's own memory"),
    ],
)
def test_which_do_not(spoil):
    params = make_params()
    grads = fuse(params)[0].grads
    set_grads(params, 1)
    params[1].grad = spoil(params[1])
    wanted = params[1].grad.clone()
    states = grads.gather(in_place=InPlace.WRITE)
    assert states[1] == grad_slots.IN_BUFFER
    torch.testing.assert_close(params[1].grad, wanted, rtol=0, atol=0)


def test_memory_of_gradients_is_let_go_of():
    params = make_params()
    optimizer = optimizers.NpuFusedAdam(params, lr=0.1)
    for i in range(2):
        set_grads(params, i)
        optimizer.step()
    grad = weakref.ref(params[1].grad)
    storage = params[1].grad.untyped_storage()
    optimizer.zero_grad()
    gc.collect()
    assert grad() is None
    assert torch._C._storage_Use_Count(storage._cdata) == 1


def one_tensor(value):
    return value, value


def views_of_one(value):
    return value.view(40, 30), value.view(40, 30)


def arrays_of_one(value):
    return torch.from_numpy(value.numpy()), torch.from_numpy(value.numpy())


@pytest.mark.parametrize("pair", [one_tensor, views_of_one, arrays_of_one])
@pytest.mark.parametrize("groups", [1, 2])
def test_two_parameters_with_one_gradient_are_unscaled_once(groups, pair):
    params = make_params()[1:2] + make_params(1)[1:2]
    parts = [params] if groups == 1 else [params[:1], params[1:]]
    flats = [fuse(part)[0].grads for part in parts]
    shared = torch.full((40, 30), 8.0)
    for p, grad in zip(params, pair(shared), strict=True):
        p.grad = grad
    for flat in flats:
        flat.take(0.5)
    for p in params:
        torch.testing.assert_close(p.grad, torch.full((40, 30), 4.0), rtol=0, atol=0)
    if (groups, pair) != (2, one_tensor):  # which is the second's own once the first has been brought into its slot
        assert shared.eq(8.0).all()


@pytest.mark.parametrize("pair", [one_tensor, views_of_one, arrays_of_one])
def test_two_groups_with_one_gradient_are_clipped_once(pair):
    params = make_params()[1:2] + make_params(1)[1:2]
    optimizer = optimizers.NpuFusedSGD([{"params": [p]} for p in params], lr=0.1)
    for p, grad in zip(params, pair(torch.ones(40, 30)), strict=True):
        p.grad = grad
    norm = optimizer.clip_optimizer_grad_norm_fused(1.0)
    assert norm.item() == pytest.approx(2400**0.5)
    for p in params:
        torch.testing.assert_close(p.grad, torch.full((40, 30), 2400**-0.5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("cls", [optimizers.NpuFusedSGD, optimizers.NpuFusedAdam])
def test_gradients_may_be_parameters_that_do_not_move(cls, groups):
    def train(own_memory):
        arrays = [np.full((40, 30), value, dtype=np.float32) for value in (3.0, 2.0, 1.0)]
        params = [nn.Parameter(torch.from_numpy(array)) for array in arrays]
        parts = [params] if groups == 1 else [params[:1], params[1:]]
        optimizer = cls([{"params": part} for part in parts], lr=0.1)
        for _ in range(3):
            for p, q in zip(params, (params[1], params[0], params[2]), strict=True):
                p.grad = q.detach().clone() if own_memory else q.detach()
            optimizer.step()
        return params

    assert_equal_params(train(own_memory=False), train(own_memory=True), 1e-6)


def test_gradients_can_be_swapped_when_they_have_been_stepped():
    model = nn.Linear(40, 30)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            model(torch.ones(2, 40, dtype=dtype)).sum().backward()
            before = model.weight.detach().clone()
            grad = model.weight.grad.clone()
            optimizer.step()
            torch.testing.assert_close(model.weight.detach(), before - 0.1 * grad)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_negated_view_is_taken_with_its_sign(dtype):
    params = [nn.Parameter(p.detach().to(dtype)) for p in make_params()]
    grads = fuse(params)[0].grads
    if dtype != torch.float32:
        grads.widen()
    for p in params:
        p.grad = torch._neg_view(torch.ones_like(p))
    grads.take(0.5)
    for p in params:
        torch.testing.assert_close(p.grad, torch.full(p.shape, -0.5))


def test_a_gradient_on_another_device_is_refused():
    param, grad = nn.Parameter(torch.zeros(3)), torch.zeros(3, device="meta")
    storage.set_grads([param], [grad])  # as after the parameter has been moved
    with pytest.raises(RuntimeError, match=r"parameter 0 .* is on cpu and has a gradient on meta"):
        FlatGrads.apart([param]).take()
    assert param.grad is grad


@pytest.mark.parametrize("stepped", [False, True])
def test_zeros_are_written_where_gradients_are(stepped):
    """As torch writes them: a script may hold what it has from ``p.grad``."""
    params = make_params()
    optimizer = optimizers.NpuFusedSGD(params, lr=0.1, momentum=0.9)
    set_grads(params, 1)
    optimizer.step()
    optimizer.zero_grad()
    set_grads(params, 2)
    held = [p.grad for p in params]
    if stepped:
        optimizer.step()  # which copies small ones
    optimizer.zero_grad(set_to_none=False)
    for i, (p, grad) in enumerate(zip(params, held, strict=True)):
        assert not p.grad.any()
        if i in LARGE or not stepped:
            assert p.grad is grad


def test_what_a_script_keeps_is_not_written_by_unscaling():
    params = make_params()
    grads = fuse(params)[0].grads
    set_grads(params, 1)
    grads.gather()
    kept, values = params[0].grad, params[0].grad.tolist()
    set_grads(params, 2)
    expected = [(p.grad * 0.5).tolist() for p in params]
    grads.unscale_(0.5, torch.zeros(1))
    assert kept.tolist() == values
    assert [p.grad.tolist() for p in params] == expected
