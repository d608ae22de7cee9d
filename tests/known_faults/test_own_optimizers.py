# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of a script's own: subclasses with another rule, and those with parameter groups inside."""

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from known_faults.common import (
    CASTING,
    WITH_MASTERS,
    Weights,
    X,
    assert_values,
    initialize,
    levels,
    right_or_refused,
    train_step,
    vector,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from apex_npu import optimizers

WITHOUT_MASTERS = ("O0", *CASTING)
MOVED = 10.0 - vector(*X).cpu()


class MovesByAHundred(optimizers.NpuFusedSGD):
    def _group_step(self, group_index):
        for p in self.param_groups[group_index]["params"]:
            p.data.sub_(100.0)


@levels((*WITHOUT_MASTERS, *WITH_MASTERS))
def test_a_subclass_with_a_group_step_of_its_own(level):
    model = Weights(10.0)

    def act():
        _, optimizer = initialize(model, MovesByAHundred(model.parameters(), lr=0.1), level)
        train_step(model, optimizer)

    right_or_refused(act, lambda _: assert_values(model.parameters(), -90.0), model.parameters())


class OwnRule(optimizers.NpuFusedSGD):
    def update(self, run, group):
        run.param.sub_(100.0)


@levels(("O0", "O1", "O2", "O5"))
def test_a_subclass_with_an_update_of_its_own(level):
    model = Weights(10.0)
    _, optimizer = initialize(model, OwnRule(model.parameters(), lr=0.1), level)
    train_step(model, optimizer)
    assert_values(model.parameters(), -90.0)


class CopyOfAscends(torch.optim.SGD):
    is_npu_fused_optimizer = True


@levels((*WITHOUT_MASTERS, *WITH_MASTERS))
@pytest.mark.parametrize("fuse_unscale", [False, True])
def test_an_optimizer_that_a_script_brings_along_and_marks_as_fused(fuse_unscale, level):
    model = Weights(10.0)

    def act():
        _, optimizer = initialize(model, CopyOfAscends(model.parameters(), lr=1.0), level, fuse_unscale=fuse_unscale)
        train_step(model, optimizer)

    right_or_refused(act, lambda _: assert_values(model.parameters(), MOVED), model.parameters())


class Both(torch.optim.Optimizer):
    """One optimizer over two, with a group of its own for all of their parameters."""

    def __init__(self, *inner):
        self.inner = inner
        super().__init__(self.all_params(), {})

    def all_params(self):
        return [p for optimizer in self.inner for group in optimizer.param_groups for p in group["params"]]

    def step(self, closure=None):
        for optimizer in self.inner:
            optimizer.step()


class SharesGroups(Both):
    """An optimizer over two others, which shares their groups."""

    def all_params(self):
        return [group for optimizer in self.inner for group in optimizer.param_groups]


@levels((*WITHOUT_MASTERS, *WITH_MASTERS))
@pytest.mark.parametrize("inner", [torch.optim.SGD, optimizers.NpuFusedSGD])
def test_one_optimizer_over_two(inner, level):
    model = Weights(10.0, 10.0)

    def act():
        _, optimizer = initialize(model, Both(*[inner([w], lr=1.0) for w in model.w]), level)
        train_step(model, optimizer)

    right_or_refused(act, lambda _: assert_values(model.parameters(), MOVED, MOVED), model.parameters())


@levels((*WITHOUT_MASTERS, *WITH_MASTERS))
def test_one_optimizer_over_two_that_shares_their_groups(level):
    model = Weights(10.0, 10.0)
    _, optimizer = initialize(model, SharesGroups(*[torch.optim.SGD([w], lr=1.0) for w in model.w]), level)
    train_step(model, optimizer)
    assert_values(model.parameters(), MOVED, MOVED)


@pytest.fixture
def alone():
    """A process group of this process."""
    if not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    backend = "gloo" if DEVICE.type == "cpu" else "cpu:gloo,npu:hccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@levels((*WITHOUT_MASTERS, *WITH_MASTERS))
def test_zero_redundancy_optimizer(level):
    model = Weights(10.0)

    def act():
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        _, optimizer = initialize(model, optimizer, level)
        train_step(model, optimizer)

    right_or_refused(act, lambda _: assert_values(model.parameters(), MOVED), model.parameters())
