# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients and parameters on their way into flat buffers, by copies or, on an NPU, joined: always the same values."""

import pytest
import torch
from devices import DEVICE
from torch import nn

from apex_npu.fusion import FlatGrads
from apex_npu.ops import cats_lists
from apex_npu.ops.gather import cat_into
from apex_npu.optimizers import NpuFusedSGD

SHAPES = [(3, 5), (), (7,), (0,), (4, 4), (0, 3), (1, 6), (2, 3, 4), (17,), (1,)] * 6


def made(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(DEVICE)) for shape in shapes]


def give_gradients(params, change=lambda i, g: g):
    """Gradients of their own, and clones of these."""
    generator = torch.Generator().manual_seed(1)
    for i, p in enumerate(params):
        p.grad = change(i, torch.randn(p.shape, generator=generator).to(p.dtype).to(DEVICE))
    return [None if p.grad is None else p.grad.clone() for p in params]


def check(flat, params, expected):
    """All gradients are there, bit for bit, and zeros between those slots that have one."""
    states = flat.gather()
    covered = torch.zeros(flat.flat.numel(), dtype=torch.bool)
    for p, offset, grad, state in zip(params, flat.offsets, expected, states, strict=True):
        covered[offset : offset + p.numel()] = True
        assert bool(state) == (grad is not None)
        if grad is not None:
            torch.testing.assert_close(p.grad, grad, rtol=0, atol=0)
            torch.testing.assert_close(
                flat.flat[offset : offset + p.numel()].sort().values, grad.flatten().sort().values, rtol=0, atol=0
            )
    assert not flat.flat.cpu()[~covered].any()


def test_gradients_of_other_layouts():
    params = made([(6, 8)] * 20) + [nn.Parameter(p.detach().t()) for p in made([(5, 3)] * 20)]

    def change(i, g):
        if i % 3 == 0:
            return torch.empty_like(g.t().contiguous()).copy_(g.t()).t()  # transposed in memory
        return torch.stack([g, g], dim=-1)[..., 0] if i % 3 == 1 else g

    flat = FlatGrads.apart(params)
    check(flat, params, give_gradients(params, change))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have the dtype of their parameter")
def test_half_precision_gradients_of_float32_parameters():
    params = made()
    flat = FlatGrads.apart(params)
    expected = give_gradients(params)
    for i, p in enumerate(params):
        p.grad_dtype = None
        p.grad = p.grad.to((torch.float16, torch.float32, torch.bfloat16)[i % 3])
        expected[i] = p.grad.float()
    check(flat, params, expected)


def test_gradients_that_are_views_of_slots():
    params = made([(4,)] * 50)
    flat = FlatGrads.apart(params)
    check(flat, params, give_gradients(params))
    grads = [p.grad for p in params]
    expected = [g.clone() for g in [*grads[1:], grads[0]]]
    for p, g in zip(params, [*grads[1:], grads[0]], strict=True):  # each in the slot of another
        p.grad = g
    check(flat, params, expected)


@pytest.mark.skipif(not cats_lists(DEVICE), reason="joined on an NPU alone")
def test_one_launch_whatever_the_number():
    import npu_simulator

    for count in (10, 500):
        params = made([(3, 5), (7,), (4, 4)] * count)
        flat = FlatGrads.apart(params)
        flat.gather()
        for _ in range(2):
            give_gradients(params)
            with npu_simulator.count() as n:
                flat.gather()
        assert (n.launches, n.syncs) == (1, 0)


@pytest.mark.skipif(not cats_lists(DEVICE), reason="joined on an NPU alone")
def test_a_first_step_takes_as_many_launches_for_60_parameters_as_for_3():
    import npu_simulator

    launches = []
    for count in (1, 20):
        params = made([(3, 5), (7,), (4, 4)] * count)
        give_gradients(params)
        before = [p.detach().clone() for p in params]
        optimizer = NpuFusedSGD(params, lr=0.5, momentum=0.9)
        with npu_simulator.count() as n:
            optimizer.step()
        launches.append(n.launches)
        for p, old in zip(params, before, strict=True):
            torch.testing.assert_close(p, old - 0.5 * p.grad)
    assert launches[0] == launches[1]


def test_join():
    out = torch.full((12,), 9.0, device=DEVICE)
    tensors = [
        torch.arange(1.0, 4.0, device=DEVICE),
        torch.ones(0, device=DEVICE),
        torch.full((2,), 7.0, device=DEVICE),
    ]
    cat_into(out[1:11], tensors, [2, 3, 0], torch.zeros(3, device=DEVICE))
    assert out.tolist() == [9, 1, 2, 3, 0, 0, 0, 0, 0, 7, 7, 9]
