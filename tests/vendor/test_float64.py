# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""float64 parameters on an NPU, which torch_npu can hold, and whose operators CANN does not document."""

import host_cann
import pytest
import torch
from torch import nn

from apex_npu.optimizers import FusedEMA, NpuFusedAdamW, NpuFusedLamb, NpuFusedSGD

DEVICE = torch.device("npu:0")


def float64_model():
    model = nn.Linear(3, 2).double().to(DEVICE)
    assert model.weight.dtype == torch.float64  # unlike model.to(DEVICE).double(), which gives float32
    return model


@pytest.mark.parametrize("cls", [NpuFusedAdamW, NpuFusedSGD, NpuFusedLamb])
def test_refused_before_anything_moves(cls):
    model = float64_model()
    places = [p.data_ptr() for p in model.parameters()]
    with (
        host_cann.count() as counted,
        pytest.raises(TypeError, match=rf"{cls.__name__}: parameter 0 .* torch.float64 on npu:0"),
    ):
        cls(model.parameters(), lr=0.1)
    assert counted.launches == counted.syncs == 0
    assert [p.data_ptr() for p in model.parameters()] == places


def test_refused_in_another_group():
    first = nn.Linear(3, 2).to(DEVICE)
    optimizer = NpuFusedSGD(first.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"parameter 0 .* is torch.float64 on npu:0"):
        optimizer.add_param_group({"params": list(float64_model().parameters())})
    assert len(optimizer.param_groups) == 1


def test_refused_where_the_model_has_been_moved_later():
    model = nn.Linear(3, 2).double()
    optimizer = NpuFusedAdamW(model.parameters(), lr=0.1)
    model.to(DEVICE)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().cpu() for p in model.parameters()]
    with pytest.raises(TypeError, match=r"NpuFusedAdamW: parameter 0 .* is torch.float64 on npu:0"):
        optimizer.step()
    assert all(torch.equal(p.detach().cpu(), old) for p, old in zip(model.parameters(), before, strict=True))
    assert not optimizer.state


def test_what_is_frozen_may_be_float64():
    model = nn.Sequential(nn.Linear(3, 2).to(DEVICE), float64_model().requires_grad_(False))
    optimizer = NpuFusedSGD(model.parameters(), lr=0.5)
    before = model[0].bias.detach().cpu()
    model[0].bias.grad = torch.ones_like(model[0].bias)
    optimizer.step()
    torch.testing.assert_close(model[0].bias.detach().cpu(), before - 0.5)


def test_the_error_says_what_to_do():
    model = float64_model().float()
    optimizer = NpuFusedSGD(model.parameters(), lr=0.5)
    before = model.bias.detach().cpu()
    model.bias.grad = torch.ones_like(model.bias)
    optimizer.step()
    torch.testing.assert_close(model.bias.detach().cpu(), before - 0.5)


def test_averages():
    with pytest.raises(TypeError, match=r"FusedEMA: weight is torch.float64 on npu:0"):
        FusedEMA(float64_model())
    FusedEMA(nn.Linear(3, 2).double()).update()  # on a CPU there is float64
