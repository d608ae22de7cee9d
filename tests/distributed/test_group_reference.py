# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A process group that has been destroyed is gone: amp does not keep it, and says so where it is needed."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # while there is no group: its functions keep the default one as a default argument
from devices import DEVICE, communication_backend
from small_programs import backward
from torch import nn

from apex_npu import amp, optimizers

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group(communication_backend(), init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield weakref.ref(dist.group.WORLD)
    if dist.is_initialized():
        dist.destroy_process_group()


def set_up(**options):
    model = nn.Linear(4, 3).to(DEVICE)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0, **options)
    return model, optimizer


def step(model, optimizer):
    loss = model(torch.ones(2, 4, device=DEVICE)).float().sum()
    backward(loss, optimizer)
    optimizer.step()


@pytest.mark.parametrize("argument", ["process_group", "overflow_group"])
def test_a_destroyed_group_is_freed_and_reported(process_group, argument):
    if argument == "process_group":
        options = {"combine_grad": True, "combine_ddp": True}
    else:
        options = {"overflow_group": dist.group.WORLD}
    model, optimizer = set_up(**options)
    del options
    step(model, optimizer)
    weights = [p.detach().clone() for p in model.parameters()]

    dist.destroy_process_group()
    assert process_group() is None  # so its threads have ended
    with pytest.raises(RuntimeError, match=f"as {argument} has been destroyed"):
        step(model, optimizer)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True))


def test_amp_can_be_initialized_with_the_next_group(process_group, tmp_path):
    step(*set_up(combine_grad=True, combine_ddp=True))
    dist.destroy_process_group()
    dist.init_process_group(communication_backend(), init_method=f"file://{tmp_path / 'next'}", rank=0, world_size=1)
    model, optimizer = set_up(combine_grad=True, combine_ddp=True)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
