# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""SGD by CANN's kernel on the vendor's torch_npu, as torch.optim.SGD on the CPU, for gradients of any kind."""

import pytest
import torch
from torch import nn

from apex_npu.optimizers import NpuFusedSGD

SHAPES = [(3, 5), (), (7,), (0,), (4, 4), (1, 6), (2, 3, 4), (17,), (1,)] * 2
OPTIONS = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.5, "dampening": 0.3, "maximize": True},
    {"momentum": 0.0, "weight_decay": 0.1},
]


def pair(options):
    """The same parameters on the NPU and on the CPU, each with its optimizer."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    ours = [nn.Parameter(v.npu()) for v in values] + [nn.Parameter(torch.ones(5, 3).npu().t())]
    theirs = [nn.Parameter(v.clone()) for v in values] + [nn.Parameter(torch.ones(5, 3).t())]
    return ours, NpuFusedSGD(ours, lr=0.1, **options), theirs, torch.optim.SGD(theirs, lr=0.1, **options)


@torch.no_grad()
def give(ours, theirs, seed, change=lambda i, g: g):
    generator = torch.Generator().manual_seed(seed)
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        grad = torch.empty_like(q).copy_(torch.randn(q.shape, generator=generator))  # strided as autograd has it
        p.grad = change(i, torch.empty_like(p).copy_(grad))
        q.grad = None if p.grad is None else grad


def same(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-5, atol=1e-6)


def absent_in_turn(step):
    return lambda i, g: None if (i + step) % 3 == 0 else g


CHANGES = {
    "as they are": lambda step: lambda i, g: g,
    "late": lambda step: lambda i, g: None if i > 4 and step < 2 else g,
    "absent in turn": absent_in_turn,
    "of another layout": lambda step: lambda i, g: torch.stack([g, g], -1)[..., 0] if i % 2 else g,
    "one needs a graph": lambda step: lambda i, g: g.requires_grad_() if i == 4 else g,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_torch(options, change):
    ours, optimizer, theirs, reference = pair(options)
    for step in range(4):
        give(ours, theirs, step, change(step))
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        same(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        if "momentum_buffer" in reference.state[q] and reference.state[q]["momentum_buffer"] is not None:
            found = optimizer.state[p]["momentum_buffer"].cpu()
            torch.testing.assert_close(found, reference.state[q]["momentum_buffer"], rtol=1e-5, atol=1e-6)


def test_gradients_that_stay_and_are_zeroed():
    ours, optimizer, theirs, reference = pair(OPTIONS[1])
    for step in range(4):
        for p, q in zip(ours, theirs, strict=True):
            (p.square().sum() * (step + 1)).backward()
            (q.square().sum() * (step + 1)).backward()
        optimizer.step()
        reference.step()
        optimizer.zero_grad(set_to_none=False)
        reference.zero_grad(set_to_none=False)
    same(ours, theirs)


def test_a_gradient_that_is_a_view_of_a_parameter():
    ours, optimizer, theirs, reference = pair(OPTIONS[0])
    for step in range(3):
        give(ours, theirs, step)
        for params in (ours, theirs):
            params[0].grad = params[9].detach()  # which is stepped, too
        reference_grad = theirs[9].detach().clone()
        theirs[0].grad = reference_grad
        optimizer.step()
        reference.step()
        same(ours, theirs)


def test_a_scale_that_is_handed_over():
    ours, optimizer, theirs, reference = pair(OPTIONS[0])
    optimizer._step_supports_amp_scaling = True
    for step in range(3):
        give(ours, theirs, step)
        optimizer.grad_scale = torch.full((1,), 2.0).npu()
        optimizer.found_inf = torch.zeros(1).npu()
        for q in theirs:
            q.grad = q.grad / 2
        optimizer.step()
        reference.step()
        same(ours, theirs)


class ReadsFlat(NpuFusedSGD):
    """A subclass whose rule supports flat gradients alone."""

    def update(self, run, group):
        run.param.sub_(run.grad, alpha=group["lr"])


def test_a_subclass_that_reads_flat_gradients():
    ours, _, theirs, _ = pair(OPTIONS[0])
    optimizer, reference = ReadsFlat(ours, lr=0.1, momentum=0.9), torch.optim.SGD(theirs, lr=0.1)
    for step in range(3):
        give(ours, theirs, step)
        optimizer.step()
        reference.step()
        same(ours, theirs)
