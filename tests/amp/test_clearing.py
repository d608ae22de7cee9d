# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``random_programs.py`` does not draw: plain backwards among zeros of gradients, or before a block that fails."""

import contextlib

import pytest
import torch
from small_programs import LEVELS, WITH_MASTERS, Weights, assert_values, backward, kinds, levels, start, vector

from apex_npu import amp

pytestmark = pytest.mark.host

KINDS = ("torch", "combine_grad", "fused")  # with fuse_unscale plain gradients would be added to scaled ones


def ready(kind, level, **options):
    model, optimizer = start(Weights(10.0, 10.0), kind=kind, level=level, **options)
    return model, optimizer, vector(1.0, 1.0, 1.0)


@kinds(KINDS)
@levels(LEVELS)
def test_a_gradient_that_a_script_gives_to_master_params_after_clearing_is_stepped(level, kind):
    model, optimizer, x = ready(kind, level)
    backward(model(x), optimizer)
    model.zero_grad()
    for p in amp.master_params(optimizer):
        p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    assert_values(model.parameters(), 8.0, 8.0)


@pytest.mark.pairwise
@pytest.mark.parametrize("by", ["model", "optimizer"])
@pytest.mark.parametrize("then", ["a look", "a plain backward"])
@kinds(KINDS)
@levels(LEVELS)
def test_zeros_stay_gradients_until_they_are_set_to_none(level, kind, then, by):
    model, optimizer, x = ready(kind, level, momentum=0.5)
    backward(model(x), optimizer)
    optimizer.step()
    clearing = model if by == "model" else optimizer
    clearing.zero_grad(set_to_none=False)
    for after in (8.5, 8.25, 8.125):
        if then == "a look":
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 100.0)
        else:
            model(x, only=(0,)).backward()
        optimizer.step()
        assert_values([model.w[1]], after)
    clearing.zero_grad()
    backward(model(x, only=(0,)), optimizer)
    optimizer.step()
    assert_values([model.w[1]], 8.125)


@kinds(KINDS)
@levels(LEVELS)
def test_gradients_of_a_backward_before_a_block_that_fails_are_kept(level, kind):
    model, optimizer, x = ready(kind, level)
    model(x, only=(1,)).backward()
    with contextlib.suppress(ZeroDivisionError), amp.scale_loss(model(x), optimizer) as scaled_loss:
        if level in WITH_MASTERS:
            scaled_loss.backward()
        raise ZeroDivisionError
    assert_values([model.w[1].grad], 1.0)
    backward(model(x), optimizer)
    optimizer.step()
    assert_values(model.parameters(), 9.0, 8.0)
