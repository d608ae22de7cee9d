# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Weights that a script writes between ``initialize`` and the first step are those that are trained.

Apex makes masters at the first ``scale_loss``, from what the model holds then.
"""

import pytest
import torch
from small_programs import WITH_MASTERS, Weights, X, assert_values, kinds, levels, start, train_step
from torch import nn


def in_place(model):
    with torch.no_grad():
        model.w[0].fill_(5.0)


def through_data(model):
    model.w[0].data.copy_(torch.full((3,), 5.0))


def by_init(model):
    nn.init.constant_(model.w[0], 5.0)


def repointed(model):
    model.w[0].data = torch.full_like(model.w[0], 5.0)


def loaded_by_copy(model):
    backbone = {name: torch.full((3,), 5.0) for name, _ in model.named_parameters() if name == "w.0"}
    for name, value in backbone.items():
        dict(model.named_parameters())[name].data.copy_(value)


WRITES = (in_place, through_data, by_init, repointed, loaded_by_copy)
writes = pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)


@kinds(("torch", "fused", "fuse_unscale"))
@levels(WITH_MASTERS)
@writes
def test_what_is_written_before_the_first_step_is_trained(write, level, kind):
    model = Weights(1.0, 2.0)
    model, optimizer = start(model, kind=kind, level=level)
    write(model)
    train_step(model, optimizer)
    moved = torch.tensor(X)
    assert_values(model.parameters(), 5.0 - moved, 2.0 - moved)


@levels(("O0", "O1", "O4"))
@writes
def test_without_masters_what_is_written_is_trained(write, level):
    model = Weights(1.0, 2.0)
    model, optimizer = start(model, level=level)
    write(model)
    train_step(model, optimizer)
    moved = torch.tensor(X)
    assert_values(model.parameters(), 5.0 - moved, 2.0 - moved)


@levels(WITH_MASTERS)
def test_a_weight_that_nothing_was_written_to_keeps_what_casting_would_lose(level):
    exact = 1.0 + 2.0**-20
    model, optimizer = start(Weights(exact), level=level, lr=0.0)
    train_step(model, optimizer)
    assert_values([model.state_dict()["w.0"]], exact)


@levels(WITH_MASTERS)
def test_weights_beside_the_one_that_is_written_keep_their_precision(level):
    exact = 1.0 + 2.0**-20
    model, optimizer = start(Weights(1.0, exact), level=level, lr=0.0)
    in_place(model)
    train_step(model, optimizer)
    assert_values([model.state_dict()[name] for name in ("w.0", "w.1")], 5.0, exact)


@levels(WITH_MASTERS)
def test_what_is_loaded_before_the_first_step_is_trained(level):
    model, optimizer = start(Weights(1.0), level=level)
    model.load_state_dict({"w.0": torch.full((3,), 5.0)})
    train_step(model, optimizer)
    assert_values(model.parameters(), 5.0 - torch.tensor(X))
