# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A skipped step is visible: in ``amp.last_step``, to schedulers, to trainers, and in the log where it never ends."""

import logging
import math
import warnings

import pytest
import torch
from devices import DEVICE, needs
from torch import nn

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def make(level="O2", cls=optimizers.NpuFusedSGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).to(DEVICE)
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 2.0**8, "verbosity": 0, **options}
    return amp.initialize(model, cls(model.parameters(), lr=0.1), opt_level=level, **options)


def backward(model, optimizer, bad=None, loss_id=0):
    loss = model(torch.ones(2, 3, device=DEVICE)).square().sum()
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()
        if bad is not None:
            model[0].weight.grad[0, 0] = bad


def step(model, optimizer, bad=None, loss_id=0):
    backward(model, optimizer, bad, loss_id)
    optimizer.step()
    optimizer.zero_grad()
    return amp.last_step(optimizer)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cls", [torch.optim.SGD, optimizers.NpuFusedSGD])
def test_what_last_step_tells(level, cls):
    model, optimizer = make(level, cls, num_losses=2)
    assert amp.last_step(optimizer) is None
    report = step(model, optimizer)
    assert (report.applied, report.skipped, report.loss_id) == (True, False, 0)
    assert (report.scale_before, report.scale_after) == (2.0**8, 2.0**8)
    report = step(model, optimizer, math.inf, loss_id=1)
    assert (report.applied, report.loss_id, report.scale_before, report.scale_after) == (False, 1, 2.0**8, 2.0**7)
    assert (report.skipped_steps, report.skips_in_a_row) == (1, 1)
    report = step(model, optimizer, math.nan)
    assert (report.skipped_steps, report.skips_in_a_row, report.loss_id) == (2, 2, 0)
    report = step(model, optimizer, loss_id=1)
    assert (report.applied, report.skipped_steps, report.skips_in_a_row) == (True, 2, 0)
    assert (report.scale_before, report.scale_after) == (2.0**7, 2.0**7)


@pytest.mark.filterwarnings("ignore:amp.scale_loss was given a loss that does not require grad:RuntimeWarning")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_a_block_has_checked_with_serves_the_next_one_alone_where_nothing_overflowed(level):
    """The flag of a block is kept for the next one, and the divisor with it: neither may outlast what it stands for."""
    model, optimizer = make(level, scale_window=2)
    pattern = [None, math.inf, None, None, None, math.nan, math.inf, None]
    for bad in pattern:
        backward(model, optimizer, bad)
        gradient = next(iter(amp.master_params(optimizer))).grad
        expected = torch.autograd.grad(
            model(torch.ones(2, 3, device=DEVICE)).float().square().sum(), next(model.parameters())
        )[0]
        if bad is None:
            torch.testing.assert_close(gradient.float(), expected.float(), rtol=1e-2, atol=1e-3)
        optimizer.step()
        assert amp.last_step(optimizer).skipped == (bad is not None)
        optimizer.zero_grad()
        with torch.inference_mode(), amp.scale_loss(torch.ones((), device=DEVICE), optimizer):
            pass  # what is made in this mode cannot be written outside of it


def test_the_loss_whose_overflow_came_first_is_the_one_named():
    model, optimizer = make(num_losses=2)
    backward(model, optimizer, math.inf, loss_id=1)
    backward(model, optimizer)
    optimizer.step()
    assert amp.last_step(optimizer).loss_id == 1


def test_without_scale_loss_a_step_is_applied():
    model, optimizer = make("O0")
    model(torch.ones(2, 3, device=DEVICE)).sum().backward()
    optimizer.step()
    report = amp.last_step(optimizer)
    assert (report.applied, report.loss_id, report.scale_before) == (True, None, None)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_schedulers_follow_applied_steps_without_a_warning(level, before, between):
    """Made before or after initialize, or between an overflow and the step that it skips."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if before:
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if not before and not between:
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        backward(model, optimizer, math.inf)
        if not before and between:
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for bad in (None, None):
            optimizer.step()
            if amp.last_step(optimizer).applied:
                decay.step()
            optimizer.zero_grad()
            backward(model, optimizer, bad)
    assert optimizer.param_groups[0]["lr"] == 0.5


@needs("inf")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_after_many_skips_in_a_row_one_error_says_where_to_look(level, caplog):
    model, optimizer = make(level, skip_alarm=3)
    with caplog.at_level(logging.ERROR, "apex_npu"):
        for _ in range(2):
            step(model, optimizer, math.inf)
        step(model, optimizer)
        assert not caplog.records
        for _ in range(5):
            step(model, optimizer, math.nan)
    (record,) = caplog.records
    assert "NpuFusedSGD: 3 steps in a row have been skipped" in record.message
    assert "the gradients of 0.weight are not finite, and all others are" in record.message
    assert f"the scale of loss 0 is down to {2.0**3}" in record.message
    assert "`with amp.debug.find_overflow(model) as found:`, and print(found)" in record.message


@needs("inf")
def test_an_overflow_of_everything_points_at_the_loss(caplog):
    model, optimizer = make("O1", skip_alarm=1)
    loss = model(torch.ones(2, 3, device=DEVICE)).square().sum() * math.inf
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert "the gradients of all 4 parameters are not finite, so look at the loss itself" in caplog.text


def test_the_alarm_can_be_switched_off(caplog):
    model, optimizer = make("O1", skip_alarm=None, min_loss_scale=1.0)
    for _ in range(60):
        step(model, optimizer, math.inf)
    assert not caplog.records


def test_hysteresis_skips_before_it_shrinks():
    model, optimizer = make(scale_hysteresis=3)
    course = [math.inf, math.inf, None, math.inf, math.inf, math.inf, math.inf, None, math.inf]
    reports = [step(model, optimizer, bad) for bad in course]
    assert [r.skipped for r in reports] == [bad is not None for bad in course]
    assert [r.scale_after for r in reports] == [256, 256, 256, 256, 256, 128, 64, 64, 64]


# -------------------------------------------------------------------------------------------------------- warnings
