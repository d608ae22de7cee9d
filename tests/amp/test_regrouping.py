# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Progressive unfreezing, and models that are trained in stages: amp keeps the state of a parameter."""

import copy

import pytest
import torch
from devices import DEVICE
from small_programs import LEVELS, WITH_MASTERS, Weights, assert_values, backward, initialize, levels, train_step
from torch import nn

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host

ONES = (1.0, 1.0, 1.0)
EXACT = 1.0 + 5 * 2.0**-20  # neither this nor what two steps leave of it is in half precision
both = pytest.mark.parametrize("cls", [torch.optim.SGD, optimizers.NpuFusedSGD], ids=["torch", "fused"])


def in_stages(level, cls, *, shutdown):
    model = Weights(EXACT)
    for _ in range(2):
        model, optimizer = initialize(model, cls(model.parameters(), lr=2.0**-20), level)
        train_step(model, optimizer, ONES)
        if shutdown:
            amp.shutdown()
    return model, optimizer


@both
@pytest.mark.parametrize("shutdown", [False, True], ids=["", "shutdown"])
@levels(LEVELS)
def test_a_model_is_initialized_again_with_another_optimizer(level, shutdown, cls):
    _, optimizer = in_stages(level, cls, shutdown=shutdown)
    assert_values(amp.master_params(optimizer), EXACT - 2 * 2.0**-20)


class Backbone(nn.Module):
    """An earlier model with a new head."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.head = backbone, Weights(EXACT)

    def forward(self, x):
        return self.backbone(x) + self.head(x)


@both
@levels(LEVELS)
def test_a_part_of_a_new_model_has_been_initialized_before(level, cls):
    backbone = Weights(EXACT)
    backbone, optimizer = initialize(backbone, cls(backbone.parameters(), lr=2.0**-20), level)
    train_step(backbone, optimizer, ONES)
    model = Backbone(backbone)
    model, optimizer = initialize(model, cls(model.parameters(), lr=2.0**-20), level)
    train_step(model, optimizer, ONES)
    assert_values(model.state_dict().values(), EXACT - 2 * 2.0**-20, EXACT - 2.0**-20)


@both
@levels(LEVELS)
@pytest.mark.parametrize("then", LEVELS)
def test_a_model_is_initialized_again_at_another_level(then, level, cls):
    model = Weights(EXACT)
    for each in (level, then):
        model, optimizer = initialize(model, cls(model.parameters(), lr=2.0**-20), each)
        train_step(model, optimizer, ONES)
    assert_values(model.state_dict().values(), EXACT - 2 * 2.0**-20)


@both
@levels(WITH_MASTERS)
def test_the_optimizer_before_is_refused(level, cls):
    model, _ = in_stages(level, cls, shutdown=False)
    model, former = initialize(model, cls(model.parameters(), lr=1.0), level)
    model, optimizer = initialize(model, cls(model.parameters(), lr=2.0**-20), level)
    shown = [t.clone() for t in model.state_dict().values()]
    with pytest.raises(RuntimeError, match="again with another optimizer"):
        train_step(model, former, ONES)
    with pytest.raises(RuntimeError, match="again with another optimizer"):
        former.step()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), shown, strict=True))
    model.zero_grad()
    train_step(model, optimizer, ONES)
    assert_values(model.state_dict().values(), EXACT - 3 * 2.0**-20)


@both
@levels(WITH_MASTERS)
def test_what_is_frozen_in_the_second_stage_keeps_its_master(level, cls):
    model = Weights(EXACT, EXACT)
    model, optimizer = initialize(model, cls(model.parameters(), lr=2.0**-20), level)
    train_step(model, optimizer, ONES)
    model.w[0].requires_grad_(False)
    model, optimizer = initialize(model, cls([model.w[1]], lr=2.0**-20), level)
    train_step(model, optimizer, ONES)
    assert_values(model.state_dict().values(), EXACT - 2.0**-20, EXACT - 2 * 2.0**-20)


@both
@levels(WITH_MASTERS)
def test_a_second_initialize_that_fails_leaves_the_first(level, cls, monkeypatch):
    model = Weights(EXACT)
    model, optimizer = initialize(model, cls(model.parameters(), lr=2.0**-20), level)
    train_step(model, optimizer, ONES)
    hooks = [list(m._state_dict_hooks.values()) for m in model.modules()]
    forward = vars(model)["forward"]

    def fail(session):
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("apex_npu.amp.frontend.install", fail)
        with pytest.raises(ZeroDivisionError):
            initialize(model, cls(model.parameters(), lr=1.0), level)
    assert vars(model)["forward"] is forward
    assert [list(m._state_dict_hooks.values()) for m in model.modules()] == hooks
    train_step(model, optimizer, ONES)
    assert_values(model.state_dict().values(), EXACT - 2 * 2.0**-20)
    assert {p.dtype for p in model.parameters()} != {torch.float32}


@levels(WITH_MASTERS)
def test_after_shutdown_a_model_is_a_float32_model(level):
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3)).to(DEVICE)
    reference = copy.deepcopy(model)
    x = torch.rand(2, 3, device=DEVICE)
    model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    backward(model(x)[0].sum(), optimizer)
    amp.shutdown()
    torch.testing.assert_close(model(x)[0], reference(x)[0], rtol=0.0, atol=0.0)
    assert all(p.grad is None for p in model.parameters())  # they were multiplied with the loss scale
    model(x)[0].sum().backward()
    for module in model.modules():
        assert not {"forward", "__reduce_ex__"} & set(vars(module))
        assert not module._state_dict_hooks
        assert not module._forward_pre_hooks
