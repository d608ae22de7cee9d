# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Several groups of one optimizer."""

import pytest
import torch
from devices import DEVICE
from torch import nn

from apex_npu import optimizers

GROUPED = [
    pytest.param(optimizers.NpuFusedLamb, {"betas": (0.8, 0.9)}, id="Lamb"),
    pytest.param(optimizers.FusedLAMB, {"max_grad_norm": 0.0}, id="FusedLAMB"),
    pytest.param(optimizers.NpuFusedBertAdam, {"max_grad_norm": 0.5}, id="BertAdam"),
    pytest.param(optimizers.FusedAdam, {}, id="FusedAdam"),
]


@pytest.mark.parametrize(("cls", "options"), GROUPED)
def test_groups_step_like_optimizers_of_their_own(cls, options):
    def made():
        generator = torch.Generator().manual_seed(0)
        shapes = [(5, 7), (3,), (40, 30), (11,), (2, 3, 4), (9,)]
        params = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in shapes]
        return params, [
            {"params": params[2 * i : 2 * i + 2], "lr": 0.1 / (i + 1), "weight_decay": 0.1 * (i + 1)} for i in range(3)
        ]

    (joined, groups), (apart, each) = made(), made()
    one, several = cls(groups, lr=0.1, **options), [cls([group], lr=0.1, **options) for group in each]
    for step in range(3):
        for p, q in zip(joined, apart, strict=True):
            p.grad = torch.sin(torch.arange(p.numel(), device=DEVICE) + step).view(p.shape)
            q.grad = p.grad.clone()
        one.step()
        for optimizer in several:
            optimizer.step()
    assert all(map(torch.equal, joined, apart))


@pytest.mark.parametrize(
    "cls", [optimizers.NpuFusedSGD, optimizers.NpuFusedAdam, optimizers.NpuFusedRMSprop, optimizers.NpuFusedLamb]
)
def test_a_wrong_number_in_one_group_changes_no_group(cls):
    params = [nn.Parameter(torch.ones(4, device=DEVICE)) for _ in range(2)]
    optimizer = cls([{"params": [p]} for p in params], lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.param_groups[1]["weight_decay"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)
