# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Buckets: which gradients travel together, and in which order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apex_npu.distributed.buckets import bucket_nbytes, order_of_completion, plan_buckets, waits_little
from apex_npu.distributed.grad_reducer import divisors

SIZES = st.lists(st.integers(0, 1000), max_size=40)


@given(SIZES, st.integers(1, 3000))
def test_every_slot_is_in_one_bucket_and_buckets_are_neighbours_from_the_end(sizes, target):
    buckets = plan_buckets(sizes, target)
    assert [slot for bucket in reversed(buckets) for slot in bucket] == list(range(len(sizes)))
    for bucket in buckets[:-1]:
        assert sum(sizes[i] for i in bucket) >= target
        assert sum(sizes[i] for i in bucket[1:]) < target  # closed as soon as it was full
    assert all(bucket for bucket in buckets)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_there_are_never_more_buckets_than_asked_for(sizes, count):
    assert len(plan_buckets(sizes, bucket_nbytes(sum(sizes), count, 1, 10**9))) <= count


def test_floor_and_cap_go_before_the_count():
    assert bucket_nbytes(1000, 4, 10, 10_000) == 250
    assert bucket_nbytes(1001, 4, 10, 10_000) == 251
    assert bucket_nbytes(1000, 4, 300, 10_000) == 300
    assert bucket_nbytes(1000, 4, 10, 100) == 100
    assert bucket_nbytes(0, 4, 0, 100) == 1


def test_buckets_are_complete_when_their_last_gradient_has_come():
    assert order_of_completion([range(2, 4), range(0, 2)], [3, 2, 1, 0]) == [0, 1]
    assert order_of_completion([range(2, 4), range(0, 2)], [0, 1, 2, 3]) == [1, 0]
    assert order_of_completion([range(2, 4), range(0, 2)], [0, 2, 1, 3]) == [1, 0]


def test_a_bucket_that_waits_for_a_gradient_of_the_very_end_calls_for_another_plan():
    sizes = [10] * 8
    buckets = plan_buckets(sizes, 20)
    backward = list(reversed(range(8)))
    assert waits_little(buckets, sizes, backward)
    neighbours_swapped = [7, 6, 5, 3, 4, 2, 0, 1]
    assert waits_little(buckets, sizes, neighbours_swapped)
    last_one_first = [0, 6, 5, 4, 3, 2, 1, 7]  # the gradient at the end of memory comes last
    assert not waits_little(buckets, sizes, last_one_first)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_both_divisions_together_make_an_average_and_the_first_one_rounds_nothing(dtype, size):
    before, after = divisors(dtype, size)
    assert before * after == size
    assert math.log2(before).is_integer()
    if dtype == torch.float16:
        # As much range is given up below as above.
        assert after <= before <= 4 * after
    else:
        assert 1 <= after < 2
