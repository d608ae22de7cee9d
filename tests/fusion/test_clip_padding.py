# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Clipping by a norm that is nan, and what comes after."""

import math

import pytest
import torch
from devices import DEVICE
from torch import nn

from apex_npu import amp, optimizers


def test_one_nan_norm_is_not_found_in_later_gradients():
    torch.manual_seed(0)
    model = nn.Linear(3, 3).to(DEVICE)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    twin = nn.Linear(3, 3).to(DEVICE)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(4):
        norms = []
        for net in (model, twin):
            net(torch.ones(2, 3, device=DEVICE)).square().sum().backward()
            if number == 1:
                net.bias.grad[0] = math.nan
        norms = [optimizer.clip_optimizer_grad_norm_fused(1.0), nn.utils.clip_grad_norm_(twin.parameters(), 1.0)]
        torch.testing.assert_close(*norms, equal_nan=True)
        if norms[0].isfinite():
            optimizer.step()
            plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    torch.testing.assert_close(model.weight, twin.weight)


@pytest.mark.parametrize("fuse_unscale", [False, True])
def test_amp_skips_one_step_and_not_all_that_follow(fuse_unscale):
    model = nn.Linear(3, 3).to(DEVICE)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O1", dynamic_init_scale=64.0, fuse_unscale=fuse_unscale, verbosity=0
    )
    applied = []
    for number in range(4):
        with amp.scale_loss(model(torch.ones(2, 3, device=DEVICE)).float().square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            if number == 1:
                model.bias.grad[0] = math.nan
        optimizer.clip_optimizer_grad_norm_fused(1.0)
        optimizer.step()
        optimizer.zero_grad()
        applied.append(amp.last_step(optimizer).applied)
    amp.shutdown()
    assert applied == [True, False, True, True]
