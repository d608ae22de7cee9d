# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that ``model.zero_grad()``, or ``p.grad = None``, has dropped are stepped no more, whatever follows."""

import contextlib

import pytest
import torch
from devices import needs
from small_programs import (
    LEVELS,
    WITH_MASTERS,
    Weights,
    assert_values,
    backward,
    kinds,
    levels,
    start,
    vector,
)

from apex_npu import amp

pytestmark = pytest.mark.host

# What a script may assign to a 16-bit parameter; before 2.10 torch refuses float32.
assigned_dtypes = pytest.mark.parametrize(
    "dtype", [None, *([torch.float32] if hasattr(torch.Tensor, "grad_dtype") else [])]
)
ALL_KINDS = ("torch", "combine_grad", "fused", "fuse_unscale")


def by_the_model(model):
    model.zero_grad()


def by_assignment(model):
    for p in model.parameters():
        p.grad = None


def to_zeros(model):
    model.zero_grad(set_to_none=False)


clears = pytest.mark.parametrize("clear", [by_the_model, by_assignment], ids=lambda clear: clear.__name__)


def ready(kind, level, **options):
    model, optimizer = start(Weights(10.0, 10.0), kind=kind, level=level, **options)
    return model, optimizer, vector(1.0, 1.0, 1.0)


@pytest.mark.pairwise
@kinds(ALL_KINDS)
@levels(LEVELS)
@pytest.mark.parametrize("clear", [by_the_model, by_assignment, to_zeros], ids=lambda clear: clear.__name__)
def test_a_step_after_clearing_moves_nothing(clear, level, kind):
    model, optimizer, x = ready(kind, level)
    backward(model(x), optimizer)
    clear(model)
    optimizer.step()
    assert_values(model.parameters(), 10.0, 10.0)


@kinds(ALL_KINDS)
@levels(LEVELS)
def test_a_parameter_whose_gradient_alone_is_dropped_is_not_stepped(level, kind):
    model, optimizer, x = ready(kind, level)
    backward(model(x), optimizer)
    model.w[1].grad = None
    optimizer.step()
    assert_values(model.parameters(), 9.0, 10.0)


@kinds(ALL_KINDS)
@levels(LEVELS)
@clears
def test_a_parameter_that_an_earlier_block_alone_has_reached_is_not_stepped(clear, level, kind):
    model, optimizer, x = ready(kind, level)
    backward(model(x), optimizer)
    clear(model)
    backward(model(x, only=(0,)), optimizer)
    optimizer.step()
    assert_values(model.parameters(), 9.0, 10.0)


@kinds(ALL_KINDS)
@levels(LEVELS)
def test_a_gradient_dropped_within_an_accumulation_counts_no_more(level, kind):
    model, optimizer, x = ready(kind, level)
    backward(model(x), optimizer)
    backward(model(x, only=(0,)), optimizer)
    by_the_model(model)
    backward(model(x, only=(0,)), optimizer)
    optimizer.step()
    assert_values(model.parameters(), 9.0, 10.0)


def interrupted(model, optimizer, x, inside):
    with contextlib.suppress(ZeroDivisionError), amp.scale_loss(model(x), optimizer) as scaled_loss:
        if inside:
            scaled_loss.backward()
        raise ZeroDivisionError


@pytest.mark.parametrize("inside", [False, True], ids=["before backward", "after backward"])
@kinds(ALL_KINDS)
@levels(LEVELS)
def test_after_a_block_that_an_exception_ended_the_next_one_alone_is_stepped(level, kind, inside):
    model, optimizer, x = ready(kind, level)
    backward(model(x), optimizer)
    interrupted(model, optimizer, x, inside)
    by_the_model(model)
    optimizer.step()
    assert_values(model.parameters(), 10.0, 10.0)
    backward(model(x, only=(0,)), optimizer)
    optimizer.step()
    assert_values(model.parameters(), 9.0, 10.0)


@pytest.mark.parametrize("between", [False, True], ids=["", "after an exception"])
@kinds(ALL_KINDS)
@levels(LEVELS)
def test_a_skip_goes_with_the_gradients_that_are_dropped(level, kind, between):
    model, optimizer, x = ready(kind, level, loss_scale="dynamic", dynamic_init_scale=16.0)
    backward(model(x * torch.inf), optimizer)
    if between:
        interrupted(model, optimizer, x, inside=False)
    by_the_model(model)
    backward(model(x), optimizer)
    optimizer.step()
    assert_values(model.parameters(), 9.0, 9.0)


@needs("flag_on_the_device")
@levels(LEVELS)
def test_an_overflow_that_is_dropped_before_a_deferred_check_is_none(level):
    model, optimizer, x = ready("fuse_unscale", level, loss_scale="dynamic", dynamic_init_scale=16.0)
    backward(model(x * torch.inf), optimizer)
    by_the_model(model)
    optimizer.step()
    assert_values(model.parameters(), 10.0, 10.0)
    assert amp.last_step(optimizer).applied
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 16.0


@kinds(("torch", "combine_grad", "fused"))
@levels(LEVELS)
def test_a_gradient_that_a_script_gives_to_master_params_after_clearing_is_stepped(level, kind):
    model, optimizer, x = ready(kind, level)
    backward(model(x), optimizer)
    by_the_model(model)
    for p in amp.master_params(optimizer):
        p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    assert_values(model.parameters(), 8.0, 8.0)


@assigned_dtypes
@kinds(("torch", "combine_grad", "fused"))
@levels(WITH_MASTERS)
def test_a_block_adds_to_a_gradient_that_a_script_gives(level, kind, dtype):
    model, optimizer, x = ready(kind, level)
    backward(model(x), optimizer)
    by_the_model(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0, dtype=dtype)
    backward(model(x), optimizer)
    optimizer.step()
    assert_values(model.parameters(), 7.0, 7.0)


# Zeros are gradients: momentum goes on with them.


def is_added_to_scaled_gradients(level, kind, then, by):
    return then == "a plain backward" and kind == "fuse_unscale"


@pytest.mark.pairwise(unless=is_added_to_scaled_gradients)
@pytest.mark.parametrize("by", ["model", "optimizer"])
@pytest.mark.parametrize("then", ["a step", "zeros", "a block", "a look", "a plain backward", "a failure"])
@kinds(ALL_KINDS)
@levels(LEVELS)
def test_zeros_stay_gradients_until_they_are_set_to_none(level, kind, then, by):
    if is_added_to_scaled_gradients(level, kind, then, by):
        pytest.skip("it would be added to gradients that are multiplied by the loss scale")
    model, optimizer, x = ready(kind, level, momentum=0.5)
    backward(model(x), optimizer)
    optimizer.step()
    clearing = model if by == "model" else optimizer
    clearing.zero_grad(set_to_none=False)
    for after in (8.5, 8.25, 8.125):
        if then == "zeros":
            model.w[1].grad.zero_()
        elif then == "a block":
            backward(model(x, only=(0,)), optimizer)
        elif then == "a look":
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 100.0)
        elif then == "a plain backward":
            model(x, only=(0,)).backward()
        elif then == "a failure":
            interrupted(model, optimizer, x, inside=False)
        optimizer.step()
        assert_values([model.w[1]], after)
    clearing.zero_grad()
    backward(model(x, only=(0,)), optimizer)
    optimizer.step()
    assert_values([model.w[1]], 8.125)


# Gradients of a backward outside of blocks.


@pytest.mark.pairwise
@kinds(("torch", "combine_grad", "fused"))
@levels(LEVELS)
@pytest.mark.parametrize("then", ["a block", "a failure", "nothing"])
def test_gradients_of_a_backward_before_the_block_are_kept(level, kind, then):
    model, optimizer, x = ready(kind, level, loss_scale=1.0 if then == "nothing" else 64.0)
    model(x, only=(1,)).backward()
    if then == "a failure":
        interrupted(model, optimizer, x, inside=level in WITH_MASTERS)
        assert_values([model.w[1].grad], 1.0)
    if then != "nothing":
        backward(model(x), optimizer)
    optimizer.step()
    assert_values(model.parameters(), *((10.0, 9.0) if then == "nothing" else (9.0, 8.0)))


@kinds(("torch", "combine_grad", "fused"))
@levels(LEVELS)
def test_gradients_of_a_backward_before_the_block_overflow_with_it(level, kind):
    model, optimizer, x = ready(kind, level, loss_scale="dynamic", dynamic_init_scale=16.0)
    model(x * torch.inf, only=(1,)).backward()
    backward(model(x, only=(0,)), optimizer)
    optimizer.step()
    assert not amp.last_step(optimizer).applied
    assert_values(model.parameters(), 10.0, 10.0)


@kinds(("torch", "combine_grad", "fused"))
@levels(WITH_MASTERS)
def test_gradients_of_a_backward_outside_are_clipped_and_cleared_like_others(level, kind):
    model, optimizer, x = ready(kind, level, loss_scale=1.0)
    model(x).backward()
    torch.nn.utils.clip_grad_value_(amp.master_params(optimizer), 0.5)
    model.w[0].grad = None
    optimizer.step()
    assert_values(model.parameters(), 10.0, 9.5)


@assigned_dtypes
@kinds(("torch", "combine_grad", "fused"))
@levels(WITH_MASTERS)
@pytest.mark.parametrize("blocks", [1, 2])
def test_gradients_assigned_to_the_model_after_a_block_count(level, kind, dtype, blocks):
    model, optimizer, x = ready(kind, level)
    for _ in range(blocks):
        backward(model(x), optimizer)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0, dtype=dtype)
    optimizer.step()
    assert_values(model.parameters(), 7.0, 7.0)
