# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What only AdamP has: directions that are projected, by rows or as a whole."""

import math

import pytest
import torch
from devices import DEVICE
from reference_optimizers import AdamP
from torch import nn

from apex_npu.optimizers import NpuFusedAdamP

LAYOUTS = {
    "long rows": [(2, 20_011), (7,)],
    "rows cut by chunks": [(40, 1_000), (3, 3)],
    "rows of one element": [(40_000, 1), (5, 1)],
    "one row": [(16, 1_024), (1, 64), (147,)],
    "four dimensions": [(6, 5, 3, 3), (6,), (12, 100)],
    "one element, none, no dimension": [(1,), (0,), (0, 5), (1, 1), ()],
}


def randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def twins(values, **options):
    """Parameters on the device with their optimizer, and the same in float64 with the reference."""
    ours = [nn.Parameter(v.to(DEVICE, torch.float32, copy=True)) for v in values]
    theirs = [nn.Parameter(v.float().double()) for v in values]
    return ours, NpuFusedAdamP(ours, **options), theirs, AdamP(theirs, **options)


def assert_steps_agree(values, grads_of, steps=2, **options):
    ours, optimizer, theirs, reference = twins(values, **options)
    for step in range(steps):
        for p, q, grad in zip(ours, theirs, grads_of(step), strict=True):
            p.grad = grad.to(DEVICE, torch.float32).as_strided(p.size(), p.stride()).copy_(grad)
            q.grad = grad.float().double()
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        largest = float(q.detach().abs().max()) if q.numel() else 1.0
        torch.testing.assert_close(p.detach().cpu().double(), q.detach(), rtol=5e-6, atol=5e-6 * largest)


@pytest.mark.pairwise
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("delta", [0.0, 0.5, 1.5, 10.0])
@pytest.mark.parametrize("shapes", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_is_stepped_as_in_float64(shapes, delta, nesterov, transposed):
    """Of random directions |cos| times the root of the length is below 0.5 for some, below 1.5 for most, below 10."""

    def made(seed):
        found = [randn(shape, seed + i) for i, shape in enumerate(shapes)]
        return [v.transpose(0, 1).contiguous().transpose(0, 1) if transposed and v.dim() > 1 else v for v in found]

    assert_steps_agree(
        made(0), lambda step: made(100 + step), lr=0.05, delta=delta, nesterov=nesterov, weight_decay=0.1, wd_ratio=0.3
    )


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e15])
def test_tiny_and_huge_values(scale):
    values = [randn((12, 100), 0) * scale, randn((9,), 1) * scale]
    assert_steps_agree(
        values, lambda step: [randn(v.shape, 7 + step) * scale for v in values], lr=0.1 * scale, delta=5.0
    )


def test_steps_are_orthogonal_to_what_is_projected():
    """To each row where no row's cosine is too large, else to the whole, else to nothing."""
    value, grad = randn((12, 100), 0), randn((12, 100), 1)
    cosines = nn.functional.cosine_similarity(value, grad, dim=1).abs() * math.sqrt(100)
    whole = nn.functional.cosine_similarity(value.view(1, -1), grad.view(1, -1)).abs().item() * math.sqrt(1200)
    rows = cosines.max().item()
    assert whole < rows
    for delta, by_rows, as_whole in (
        (whole / 2, False, False),
        ((whole + rows) / 2, False, True),
        (2 * rows, True, True),
    ):
        param = nn.Parameter(value.to(DEVICE, torch.float32, copy=True))
        before = param.detach().cpu().double()
        param.grad = grad.to(DEVICE, torch.float32)
        NpuFusedAdamP([param], lr=0.1, delta=delta).step()
        along = ((param.detach().cpu().double() - before) * before).sum(1)
        assert (along.abs().max() < 1e-5) == by_rows
        assert (along.sum().abs() < 1e-5) == as_whole


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_stays_with_its_parameter(bad):
    values = [randn((4, 5), i) for i in range(3)]
    found = []
    for replaced in (1.0, bad):
        params = [nn.Parameter(v.to(DEVICE, torch.float32, copy=True)) for v in values]
        for p in params:
            p.grad = torch.ones_like(p)
        params[1].grad[2, 3] = replaced
        NpuFusedAdamP(params, lr=0.1, delta=10.0, weight_decay=0.1).step()
        found.append([p.detach() for p in params])
    clean, spoiled = found
    assert torch.equal(clean[0], spoiled[0])
    assert torch.equal(clean[2], spoiled[2])
    assert not spoiled[1].isfinite().all()
