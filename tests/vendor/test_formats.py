# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Weights in FRACTAL_NZ, whose elements are stored in tiles, train like weights that are stored in rows."""

import copy
import logging

import pytest
import torch
import torch_npu
from torch import nn

from apex_npu import amp
from apex_npu.optimizers import NpuFusedLamb, NpuFusedSGD

FRACTAL_NZ = 29


@pytest.fixture(autouse=True)
def private_formats():
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 32)).npu()


def tile(model):
    for p in model.parameters():
        if p.dim() == 2:
            p.data = torch_npu.npu_format_cast(p.data, FRACTAL_NZ)


def make_sgd(params):
    return NpuFusedSGD(params, lr=0.1, momentum=0.9)


def make_lamb(params):
    return NpuFusedLamb(params, lr=0.01)


def train(make, level, tile_before=()):
    """Losses, and the model's final state dict."""
    model = make_model()
    if "initialize" in tile_before:
        tile(model)
        assert torch_npu.get_npu_format(model[0].weight) == FRACTAL_NZ
    optimizer = make(model.parameters())
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0)
    losses = []
    for step in range(5):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).npu()
        if step in tile_before:
            tile(model)
        loss = model(x).float().square().mean()
        optimizer.zero_grad()
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    amp.shutdown()
    return losses, found


@pytest.mark.parametrize("tile_before", [("initialize",), (0, 3)], ids=["before initialize", "between steps"])
@pytest.mark.parametrize("level", [None, "O0", "O1", "O2"])
@pytest.mark.parametrize("make", [make_sgd, make_lamb])
def test_tiled_weights_are_stepped_like_others(make, level, tile_before):
    losses, found = train(make, level, tile_before)
    expected_losses, expected = train(make, level)
    assert losses[-1] < losses[0]
    # LAMB's norms are sums whose last bit depends on how memory is aligned.
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(losses, expected_losses, **close)
    torch.testing.assert_close(found, expected, **close)


def test_torchs_own_optimizer_agrees():
    model = make_model()
    tile(model)
    twin = make_model().cpu()
    optimizer, reference = make_sgd(model.parameters()), torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        for m, o, data in ((model, optimizer, x.npu()), (twin, reference, x)):
            o.zero_grad()
            m(data).square().mean().backward()
            o.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-5, atol=1e-6)


def test_tied_weights_stay_tied_and_checkpoints_go_from_one_format_to_the_other(caplog):
    model = make_model()
    tile(model)
    tied = nn.Parameter(torch.empty(0, device="npu"))
    tied.data = model[0].weight.data
    optimizer = make_sgd([*model.parameters(), tied])
    x = torch.ones(4, 24, device="npu")

    def step():
        optimizer.zero_grad()
        (model(x).square().mean() + (x @ tied.t()).square().mean()).backward()
        optimizer.step()

    view = model[2].weight.detach()
    with caplog.at_level(logging.INFO, logger="apex_npu"):
        step()
    assert "2 tensor(s) have left their private formats" in caplog.text
    assert "1 of them have other views, which keep the old memory" in caplog.text
    assert torch.equal(view.cpu(), make_model()[2].weight.detach().cpu())
    assert torch.equal(tied.detach().cpu(), model[0].weight.detach().cpu())
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step()
    expected = [p.detach().cpu() for p in model.parameters()]
    tile(model)
    model.load_state_dict(saved[0])
    tied.data = model[0].weight.data
    for states in saved[1]["state"].values():
        if states["momentum_buffer"].dim() == 2:
            states["momentum_buffer"] = torch_npu.npu_format_cast(states["momentum_buffer"], FRACTAL_NZ)
    optimizer.load_state_dict(saved[1])
    step()
    for p, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.detach().cpu(), value)
