# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A model that ``.to()`` moves after ``initialize`` is trained, or refused."""

import pytest
from devices import DEVICE
from known_faults.common import (
    CASTING,
    WITH_MASTERS,
    Weights,
    X,
    assert_values,
    kinds,
    known_fault,
    levels,
    right_or_refused,
    start,
    train_step,
    vector,
)

pytestmark = pytest.mark.skipif(DEVICE.type == "cpu", reason="there is one device alone")

MOVED = 10.0 - vector(*X).cpu()
DROPPED = "masters stay on the other device, and gradients that do not fit their buffer are dropped without a word"


def train_moved(level, kind):
    model, optimizer = start(Weights(10.0).cpu(), kind=kind, level=level)
    model.to(DEVICE)
    right_or_refused(
        lambda: train_step(model, optimizer), lambda _: assert_values(model.parameters(), MOVED), model.parameters()
    )


@known_fault(DROPPED)
@kinds(("combine_grad", "fused", "fuse_unscale"))
@levels(WITH_MASTERS)
def test_a_model_with_masters_that_is_moved_after_initialize(level, kind):
    train_moved(level, kind)


@levels(WITH_MASTERS)
def test_a_model_with_masters_and_torchs_optimizer_that_is_moved_after_initialize(level):
    train_moved(level, "torch")


@kinds(("torch", "combine_grad", "fused", "fuse_unscale"))
@levels(("O0", *CASTING))
def test_a_model_that_is_moved_after_initialize(level, kind):
    train_moved(level, kind)
