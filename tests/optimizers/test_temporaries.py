# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""No step allocates memory that grows with the model: kernels go over buffers in chunks."""

import pytest
import torch
from optimizer_specs import SPECS
from small_programs import initialize
from torch import nn
from torch.profiler import ProfilerActivity, profile

from apex_npu import amp, optimizers

NUMEL = 1 << 20
# Bytes: the largest chunk of any kernel, 2¹⁸ elements of float32. All of them are four times that.
LARGEST = 1 << 20


def largest_allocation(action):
    """Bytes of the largest allocation that ``action`` requests from torch's allocator."""
    action()
    action()  # buffers are there by now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    events = profiled.profiler.kineto_results.events()
    return max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)


def test_what_is_measured():
    x = torch.zeros(NUMEL)
    assert largest_allocation(lambda: x.add(1)) == 4 * NUMEL
    assert largest_allocation(lambda: x.add(1).mul_(2).sum()) == 4 * NUMEL
    assert largest_allocation(lambda: x.add_(1)) <= 64  # for the number


def make(cls, shape, dtype, kwargs):
    params = [nn.Parameter(torch.randn(shape).to(dtype)), nn.Parameter(torch.randn(7).to(dtype))]
    return params, cls(params, **kwargs)


CASES = [pytest.param(spec.cls, kwargs, id=f"{spec}-{i}") for spec in SPECS for i, kwargs in enumerate(spec.variants)]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(NUMEL,), (1 << 10, 1 << 10)], ids=["vector", "matrix"])
@pytest.mark.parametrize(("cls", "kwargs"), CASES)
def test_a_step(cls, kwargs, shape, dtype):
    params, optimizer = make(cls, shape, dtype, kwargs)
    grads = [torch.randn_like(p) for p in params]

    def step():
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()

    # The products of Newton-Schulz iterations are of whole matrices.
    of_a_matrix = issubclass(cls, optimizers.NpuFusedMuon) and len(shape) == 2
    assert largest_allocation(step) <= (4 * NUMEL if of_a_matrix else LARGEST)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fuse_unscale", [True, False])
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("cls", [optimizers.NpuFusedAdam, optimizers.NpuFusedLamb])
def test_a_training_step_under_amp(cls, level, fuse_unscale, set_to_none):
    model = nn.ParameterList([nn.Parameter(torch.randn(NUMEL)), nn.Parameter(torch.randn(7))])
    model, optimizer = initialize(
        model, cls(model.parameters(), lr=1e-3), level, loss_scale=None, fuse_unscale=fuse_unscale
    )
    params = list(model.parameters())
    grads = [torch.randn_like(p) for p in params]
    loss = torch.ones((), requires_grad=True)

    def step():
        with amp.scale_loss(loss, optimizer):
            for p, grad in zip(params, grads, strict=True):
                if p.grad is None:
                    p.grad = grad
                else:
                    p.grad.copy_(grad)
        optimizer.clip_optimizer_grad_norm_fused(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none)

    # Where gradients stay, as zeros, a 16-bit one is widened to be added to a float32 one.
    adds = level == "O2" and not set_to_none
    assert largest_allocation(step) <= (4 * NUMEL if adds else LARGEST)
