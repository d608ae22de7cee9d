# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Memory of the vendor's allocator: nothing is kept of what has been fused again, loaded, moved or thrown away."""

import copy
import gc

import pytest
import torch
from devices import DEVICE, SIMULATOR
from torch import nn

from apex_npu import amp, optimizers


def make(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).to(DEVICE)
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
    options = {"opt_level": level, "loss_scale": "dynamic", "combine_grad": True, "verbosity": 0}
    return amp.initialize(model, optimizer, **options)


def step(model, optimizer, x):
    with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def change(kind, model, optimizer, saved):
    """What makes the optimizer take new memory, or other values."""
    if kind == 0:
        model[0].weight.data = model[0].weight.data.clone()
    elif kind == 1:
        optimizer.load_state_dict(saved)
    elif kind == 2:
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    else:
        model.to("cpu").to(DEVICE)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_is_as_before(level, steps):
    def run(count):
        model, optimizer = make(level)
        x = torch.ones(4, 6, device=DEVICE)
        step(model, optimizer, x)
        saved = copy.deepcopy(optimizer.state_dict())
        for i in range(count):
            if i % 5 == 0:
                change(i // 5 % (4 if level == "O0" else 3), model, optimizer, saved)
            step(model, optimizer, x)
        amp.shutdown()

    run(20)  # what torch_npu keeps for itself
    gc.collect()
    before = SIMULATOR.live_storages()
    run(steps)
    gc.collect()
    assert SIMULATOR.live_storages() == before
