# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``torch.nn.utils.clip_grad_norm_`` under amp: the same values, in one pass over flat buffers where that can be."""

import math

import pytest
import torch
from devices import DEVICE
from torch import nn

from apex_npu import amp, optimizers


def make(level, cls=optimizers.NpuFusedSGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(DEVICE)
    options = {"loss_scale": 128.0, "verbosity": 0, **options}
    return amp.initialize(model, cls(model.parameters(), lr=0.1), opt_level=level, **options)


def backward(model, optimizer, **options):
    with amp.scale_loss(model(torch.ones(2, 5, device=DEVICE)).square().sum(), optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def twins_of(params):
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    for twin, p in zip(twins, params, strict=True):
        twin.grad = p.grad.clone()
    return twins


@pytest.fixture
def fused_calls(monkeypatch):
    """The clippings that flat buffers did."""
    calls = []
    original = amp.optimizer_adapter.clip_grad_norm_

    def spy(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(amp.optimizer_adapter, "clip_grad_norm_", spy)
    return calls


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, "inf"])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_values_are_torchs_and_buffers_are_clipped_whole(level, norm_type, fused_calls):
    model, optimizer = make(level)
    backward(model, optimizer)
    params = list(amp.master_params(optimizer))
    twins = twins_of(params)
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.25, norm_type=norm_type)
    assert len(fused_calls) == 1
    amp.shutdown()
    expected = nn.utils.clip_grad_norm_(twins, 0.25, norm_type=norm_type)
    assert (norm.dtype, norm.shape, norm.device) == (expected.dtype, expected.shape, expected.device)
    # Sums in another order.
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
    for p, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(p.grad, twin.grad, rtol=1e-6, atol=0.0)


def test_a_norm_that_is_not_finite_raises_where_asked(fused_calls):
    model, optimizer = make("O0")
    backward(model, optimizer)
    model[0].weight.grad[0, 0] = math.inf
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 for gradients is non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert fused_calls


@pytest.mark.parametrize("case", ["some", "foreach", "torch's optimizer", "half", "delayed"])
def test_what_is_left_to_torch(case, fused_calls):
    cls = torch.optim.SGD if case == "torch's optimizer" else optimizers.NpuFusedSGD
    model, optimizer = make("O3" if case == "half" else "O0", cls)
    backward(model, optimizer, delay_unscale=case == "delayed")
    params = list(model.parameters())[: 2 if case == "some" else None]
    twins = twins_of(params)
    options = {"foreach": False} if case == "foreach" else {}
    norm = nn.utils.clip_grad_norm_(params, 0.25, **options)
    assert not fused_calls
    assert torch.equal(norm, nn.utils.clip_grad_norm_(twins, 0.25, **options))
    assert all(torch.equal(p.grad, twin.grad) for p, twin in zip(params, twins, strict=True))


def test_shutdown_gives_torch_its_functions_back():
    originals = nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_
    make("O0")
    assert nn.utils.clip_grad_norm_ is not originals[0]
    amp.shutdown()
    assert (nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_) == originals
