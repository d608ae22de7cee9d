# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A step inside a CUDA graph is refused: replayed, it would repeat the step count of its capture."""

import pytest
import torch
from devices import DEVICE

from apex_npu import optimizers


@pytest.mark.parametrize("name", ["NpuFusedSGD", "NpuFusedAdam", "NpuFusedLamb", "FusedAdam"])
def test_a_captured_step_is_refused_with_nothing_done(name, monkeypatch):
    param = torch.nn.Parameter(torch.ones(5, device=DEVICE))
    optimizer = getattr(optimizers, name)([param], lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before, called = param.detach().clone(), []
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(
            RuntimeError, match=rf"^{name}.step\(\) cannot be captured .*make_graphed_callables.*Nothing"
        ):
            optimizer.step(lambda: called.append(1))
    assert not called, "the closure belongs to the step"
    assert torch.equal(param, before)
    optimizer.step()
    assert not torch.equal(param, before)


def test_without_cuda_nobody_asks_about_captures(monkeypatch):
    def fail():
        raise AssertionError("this could make a CUDA context in a process that needs none")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    param = torch.nn.Parameter(torch.ones(5, device=DEVICE))
    param.grad = torch.ones_like(param)
    optimizers.NpuFusedSGD([param], lr=0.1).step()
