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
    assert len(seen) <= 30, [code.co_name for code in seen]
    assert len({code.co_filename for code in seen}) <= 8
    assert sum(seen.values()) <= 36
