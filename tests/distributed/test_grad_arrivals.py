# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Counting gradients in backward."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from devices import DEVICE, needs_extension
from torch import nn

from apex_npu._extension import extension

pytestmark = needs_extension


def chain(count):
    """Parameters whose gradients come from the last to the first, each once; and the loss."""
    params = [nn.Parameter(torch.full((3,), 0.5, device=DEVICE)) for _ in range(count)]

    def loss():
        x = torch.ones(3, device=DEVICE)
        for p in params:
            x = torch.tanh(x * p)
        return x.sum()

    return params, loss


def watch(params, bucket_of, *, expected=None, deferred=False):
    full = []
    arrivals = extension.GradArrivals(params, full.append)
    arrivals.plan(bucket_of, expected or [1] * len(params))
    arrivals.begin(deferred)
    return arrivals, full


def test_buckets_are_full_in_order_whatever_order_gradients_have():
    params, loss = chain(4)
    # Bucket 0 holds the gradient that comes third, bucket 1 the first two.
    arrivals, full = watch(params, [2, 0, 1, 1])
    loss().backward()
    assert arrivals.order == [3, 2, 1, 0]
    assert arrivals.counts == [1, 1, 1, 1]
    assert full == [2, 3]
    assert arrivals.late == -1


def test_a_gradient_is_complete_when_it_has_come_as_often_as_expected():
    params, loss = chain(2)
    arrivals, full = watch(params, [1, 0], expected=[1, 2])
    loss().backward()
    assert full == []
    loss().backward()
    assert full == [2]
    # Parameter 1's second is in time; the first's second comes after its bucket was reported.
    assert arrivals.late == 0
    arrivals.begin(False)
    assert (arrivals.order, arrivals.counts, arrivals.late) == ([], [0, 0], -1)


def test_deferred_nothing_is_full_and_nothing_late():
    params, loss = chain(2)
    arrivals, full = watch(params, [1, 0], deferred=True)
    loss().backward()
    loss().backward()
    assert full == []
    assert arrivals.late == -1
    assert arrivals.counts == [2, 2]


def test_gradients_that_have_a_graph_defer_the_rest():
    params, loss = chain(3)
    _, full = watch(params, [2, 1, 0])
    loss().backward(create_graph=True)
    assert full == []
    for p in params:
        p.grad = None  # of the cycle that create_graph makes


def test_after_end_and_after_close_nothing_counts():
    params, loss = chain(2)
    arrivals, full = watch(params, [1, 0])
    arrivals.end()
    loss().backward()
    arrivals.begin(False)
    arrivals.close()
    loss().backward()
    assert full == []
    assert arrivals.counts == [0, 0]
    arrivals.begin(False)  # watches again
    loss().backward()
    assert full == [1, 2]


def test_frozen_parameters_are_passed_over_until_they_are_trained():
    params, loss = chain(2)
    params[0].requires_grad_(False)
    arrivals, full = watch(params, [1, 0])
    loss().backward()
    assert full == [1]
    params[0].requires_grad_(True)
    arrivals.begin(False)
    loss().backward()
    assert full == [1, 1, 2]


def test_a_parameter_that_has_changed_its_dtype_is_still_watched():
    params, loss = chain(2)
    arrivals, full = watch(params, [1, 0])
    for p in params:
        p.data = p.data.double()
    arrivals.begin(False)
    loss().backward()
    assert full == [1, 2]


def test_what_a_full_bucket_raises_ends_backward_with_that_error():
    params, loss = chain(3)

    def fail(count):
        raise LookupError(f"{count} are full")

    arrivals = extension.GradArrivals(params, fail)
    arrivals.plan([2, 1, 0], [1, 1, 1])
    arrivals.begin(False)
    with pytest.raises(LookupError, match="1 are full"):
        loss().backward()


def test_parameters_may_outlive_what_counts():
    class OnFull:
        def __call__(self, count):
            raise AssertionError("must be gone")

    params, loss = chain(2)
    on_full = OnFull()
    arrivals = extension.GradArrivals(params, on_full)
    arrivals.plan([1, 0], [1, 1])
    arrivals.begin(False)
    value, gone = loss(), weakref.ref(on_full)
    del arrivals, on_full
    gc.collect()
    assert gone() is None
    value.backward()


def test_plans_must_fit_the_tensors():
    arrivals = extension.GradArrivals([nn.Parameter(torch.ones(1))], print)
    with pytest.raises(ValueError, match="got 2 and 1"):
        arrivals.plan([0, 1], [1])


def test_a_plan_that_does_not_fit_is_refused():
    params, _ = chain(2)
    arrivals = extension.GradArrivals(params, print)
    with pytest.raises(RuntimeError, match="call plan before it"):
        arrivals.begin(False)
    with pytest.raises(ValueError, match="buckets count from 0, got -1"):
        arrivals.plan([0, -1], [1, 1])


def test_sequences_that_make_their_tensors_when_asked_are_refused():
    class Made:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return [torch.ones(2)][index]

    with pytest.raises(TypeError, match="expected a list or tuple, got Made"):
        extension.drop_grads(Made())
