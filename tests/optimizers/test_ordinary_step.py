# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How much code of the package an ordinary step runs through: distinct functions and files, and calls."""

import sys
from collections import Counter

import pytest
import torch
from devices import DEVICE
from torch import nn

import apex_npu
from apex_npu import optimizers
from apex_npu._extension import extension

ROOT = apex_npu.__path__[0]


def calls_of(call):
    """Code objects under the package, lambdas and comprehensions included, and how often each is called."""
    seen = Counter()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            seen[frame.f_code] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.skipif(extension is None or DEVICE.type != "cpu", reason="the path with C++ is what counts")
@pytest.mark.parametrize("name", ["NpuFusedAdam", "NpuFusedSGD"])
def test_a_step_runs_through_few_functions(name):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = getattr(optimizers, name)(model.parameters(), lr=1e-3)
    x = torch.randn(8, 64)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    seen = calls_of(optimizer.step)
    assert len(seen) <= 29, [code.co_name for code in seen]
    assert len({code.co_filename for code in seen}) <= 7
    assert sum(seen.values()) <= 31


GROUPED = [
    pytest.param(optimizers.NpuFusedLamb, {"betas": (0.8, 0.9)}, id="Lamb"),
    pytest.param(optimizers.FusedLAMB, {"max_grad_norm": 0.0}, id="FusedLAMB"),
    pytest.param(optimizers.NpuFusedBertAdam, {"max_grad_norm": 0.5}, id="BertAdam"),
    pytest.param(optimizers.FusedAdam, {}, id="FusedAdam"),
]


@pytest.mark.parametrize(("cls", "options"), GROUPED)
def test_groups_step_like_optimizers_of_their_own(cls, options):
    def made():
        generator = torch.Generator().manual_seed(0)
        shapes = [(5, 7), (3,), (40, 30), (11,), (2, 3, 4), (9,)]
        params = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in shapes]
        return params, [
            {"params": params[2 * i : 2 * i + 2], "lr": 0.1 / (i + 1), "weight_decay": 0.1 * (i + 1)} for i in range(3)
        ]

    (joined, groups), (apart, each) = made(), made()
    one, several = cls(groups, lr=0.1, **options), [cls([group], lr=0.1, **options) for group in each]
    for step in range(3):
        for p, q in zip(joined, apart, strict=True):
            p.grad = torch.sin(torch.arange(p.numel(), device=DEVICE) + step).view(p.shape)
            q.grad = p.grad.clone()
        one.step()
        for optimizer in several:
            optimizer.step()
    assert all(map(torch.equal, joined, apart))
