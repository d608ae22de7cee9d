# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``fuse_unscale`` defers the check for overflow to the next read of the gradients; results are the same."""

import copy
import math
import pickle
import threading
import warnings

import pytest
import torch
from devices import DEVICE, needs
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.amp import fused_unscale
from apex_npu.amp.overflow_check import OverflowCheck

pytestmark = pytest.mark.host

LEVELS = ["O0", "O2"]


def make(level="O0", **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(DEVICE)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.5)
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 64.0, "fuse_unscale": True, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)


def backward(model, optimizer, bad=False, **options):
    with amp.scale_loss(model(torch.ones(2, 4, device=DEVICE)).float().sum(), optimizer, **options) as scaled_loss:
        scaled_loss.backward()
        if bad:
            model.bias.grad[1] = math.inf


def loss_scale():
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_skipped(model, optimizer):
    before = values(model)
    optimizer.step()
    assert amp.last_step(optimizer).skipped
    assert (amp.last_step(optimizer).scale_before, amp.last_step(optimizer).scale_after) == (64.0, 32.0)
    torch.testing.assert_close([*model.parameters()], before, rtol=0, atol=0)


ASKED_BY = {
    "step": lambda optimizer: None,
    "state_dict": lambda optimizer: amp.state_dict(),
    "an old view of the scaler": None,
    "clipping": lambda optimizer: optimizer.clip_optimizer_grad_norm_fused(1.0),
    "clipping by the largest": lambda optimizer: optimizer.clip_optimizer_grad_norm_fused(1.0, math.inf),
    "clipping by the smallest": lambda optimizer: optimizer.clip_optimizer_grad_norm_fused(1.0, -math.inf),
    "clipping by the count": lambda optimizer: optimizer.clip_optimizer_grad_norm_fused(1.0, 0.0),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("asked_by", ASKED_BY)
def test_an_overflow_is_found_by_the_first_read(level, asked_by):
    model, optimizer = make(level)
    view = amp._amp_state.loss_scalers[0]
    backward(model, optimizer, bad=True)
    if ASKED_BY[asked_by] is None:
        assert view.loss_scale() == 32.0
    else:
        ASKED_BY[asked_by](optimizer)
    assert loss_scale() == 32.0
    assert_skipped(model, optimizer)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert amp.last_step(optimizer).applied
    assert loss_scale() == 32.0
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_know_it(copied):
    model, optimizer = make()
    backward(model, optimizer, bad=True)
    twin_model, twin = copied((model, optimizer))
    assert_skipped(twin_model, twin)
    assert_skipped(model, optimizer)
    assert loss_scale() == 32.0


@pytest.mark.parametrize("fuse", [True, False])
def test_a_block_inside_the_block_of_another_optimizer_is_decided_before_it(fuse):
    models = [nn.Linear(4, 3).to(DEVICE) for _ in range(2)]
    made = [optimizers.NpuFusedSGD(m.parameters(), lr=0.5) for m in models]
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 64.0, "fuse_unscale": fuse, "verbosity": 0}
    models, made = amp.initialize(models, made, opt_level="O0", **options)
    with amp.scale_loss(models[0](torch.ones(2, 4, device=DEVICE)).sum(), made[0]) as scaled_loss:
        backward(models[1], made[1], bad=True)
        scaled_loss.backward()
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32.0, "unskipped": 1}
    for optimizer, skipped in zip(made, (False, True), strict=True):
        optimizer.step()
        assert amp.last_step(optimizer).skipped == skipped
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32.0, "unskipped": 1}


@needs("flag_on_the_device")
def test_a_block_of_one_thread_does_not_look_at_gradients_of_another(monkeypatch):
    looks = []
    real = fused_unscale.look_for_overflow
    monkeypatch.setattr(fused_unscale, "look_for_overflow", lambda units: looks.append(1) or real(units))
    models = [nn.Linear(4, 3).to(DEVICE) for _ in range(2)]
    made = [optimizers.NpuFusedSGD(m.parameters(), lr=0.5) for m in models]
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 64.0, "fuse_unscale": True, "verbosity": 0}
    models, made = amp.initialize(models, made, opt_level="O0", num_losses=2, **options)
    backward(models[0], made[0], bad=True, loss_id=0)
    other = threading.Thread(target=backward, args=(models[1], made[1]), kwargs={"loss_id": 1})
    other.start()
    other.join()
    assert not looks
    assert [state["loss_scale"] for state in amp.state_dict().values()] == [32.0, 64.0]
    assert len(looks) == 2


def test_two_threads_that_ask_at_once_have_it_decided_once():
    looking, asked = threading.Event(), threading.Event()
    decisions, answers = [], []

    def look():
        looking.set()
        asked.wait(0.2)  # for the other thread to get past a check of its own, if it could
        return [torch.ones(1)]

    check = OverflowCheck(look, decisions.append)

    def ask():
        looking.wait()
        check.resolve()
        answers.append(list(decisions))
        asked.set()

    other = threading.Thread(target=ask)
    other.start()
    check.resolve()
    other.join()
    assert decisions == [True]
    assert answers == [[True]]


@pytest.mark.parametrize("init_scale", [64.0, 1.0])
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_by_value_does_not_hide_it(level, init_scale):
    model, optimizer = make(level, dynamic_init_scale=init_scale)
    backward(model, optimizer, bad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these gradients are scaled, and that the scale falls below 1
        torch.nn.utils.clip_grad_value_(amp.master_params(optimizer), 1.0)
    assert loss_scale() == init_scale / 2
    optimizer.step()
    assert amp.last_step(optimizer).skipped


def test_a_manually_scaled_backward_does_not_hide_it():
    model, optimizer = make()
    backward(model, optimizer, bad=True)
    optimizer._prepare_amp_backward()
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler.loss_scale() == 32.0
    (model(torch.ones(2, 4, device=DEVICE)).sum() * scaler.loss_scale()).backward()
    optimizer._post_amp_backward(scaler)
    assert_skipped(model, optimizer)


@needs("inf")
@pytest.mark.parametrize("level", LEVELS)
def test_a_norm_that_is_nan_has_no_part_in_the_next_block(level):
    model, optimizer = make(level)
    backward(model, optimizer)
    p = next(iter(amp.master_params(optimizer)))
    p.grad[0] = math.nan
    assert optimizer.clip_optimizer_grad_norm_fused(1.0).isnan()
    backward(model, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32.0, "unskipped": 1}


@needs("inf")
def test_finite_gradients_whose_norm_overflows_have_not_overflowed():
    model, optimizer = make()
    huge = torch.finfo(torch.float32).max / 2
    with amp.scale_loss(torch.ones((), device=DEVICE, requires_grad=True), optimizer):
        for p in model.parameters():
            p.grad = torch.full_like(p, huge)
    norm = optimizer.clip_optimizer_grad_norm_fused(1.0)
    assert not norm.isfinite()
    assert loss_scale() == 64.0
    optimizer.step()
    assert amp.last_step(optimizer).applied


@needs("inf")
def test_gradients_that_a_script_repairs_are_stepped():
    model, optimizer = make()
    backward(model, optimizer, bad=True)
    model.bias.grad.nan_to_num_(posinf=0.0)
    before = model.bias.detach().clone()
    optimizer.step()
    assert amp.last_step(optimizer).applied
    # The sum over two rows, not their mean: 2 each.
    torch.testing.assert_close(model.bias, before - 0.5 * torch.tensor([2.0, 0.0, 2.0], device=DEVICE))


@pytest.mark.parametrize("fuse", [True, False])
def test_a_warning_that_is_an_error_does_not_let_an_overflow_through(fuse):
    model, optimizer = make(dynamic_init_scale=1.0, fuse_unscale=fuse)
    before = values(model)

    def train():
        backward(model, optimizer, bad=True)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="the loss scale has fallen"):
            train()
    optimizer.step()
    assert amp.last_step(optimizer).skipped
    torch.testing.assert_close([*model.parameters()], before, rtol=0, atol=0)
