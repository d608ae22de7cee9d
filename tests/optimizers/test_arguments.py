# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arguments and states that torch's optimizers accept, or refuse."""

import math

import pytest
import torch
from devices import DEVICE, needs
from small_programs import X, vector
from torch import nn

from apex_npu import optimizers


def parameter():
    return nn.Parameter(torch.ones(3, device=DEVICE))


ALL = {name: cls for name, cls in vars(optimizers).items() if isinstance(cls, type) and name != "FusedOptimizer"}
FUSED = {name: cls for name, cls in ALL.items() if issubclass(cls, optimizers.FusedOptimizer)}


@needs("inf")  # torch's GradScaler finds overflows by it
@pytest.mark.parametrize("name", FUSED)
def test_every_fused_optimizer_takes_fuse_grad_scaler(name):
    param = parameter()
    optimizer = FUSED[name]([param], lr=0.1, fuse_grad_scaler=True)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=64.0)
    other = parameter()
    plain = FUSED[name]([other], lr=0.1)
    scaler.scale((param * vector(*X)).sum()).backward()
    scaler.step(optimizer)
    (other * vector(*X)).sum().backward()
    plain.step()
    torch.testing.assert_close(param, other)


@pytest.mark.parametrize("count", [1.5, torch.tensor(1.5), -1, math.nan], ids=str)
def test_a_step_that_is_no_count_is_refused(count):
    param = parameter()
    optimizer = optimizers.NpuFusedAdam([param])
    param.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = count
    with pytest.raises(ValueError, match="count"):
        optimizer.load_state_dict(state)


def test_the_state_of_fused_adagrad_goes_on_in_torchs():
    ours, theirs = parameter(), parameter()
    first = optimizers.FusedAdagrad([ours], lr=0.1, eps=1e-10)
    reference = torch.optim.Adagrad([theirs], lr=0.1, eps=1e-10)
    for param, optimizer in ((ours, first), (theirs, reference)):
        (param * vector(*X)).sum().backward()
        optimizer.step()
    second = torch.optim.Adagrad([ours], lr=0.1, eps=1e-10)
    second.load_state_dict(first.state_dict())
    second.step()
    reference.step()
    torch.testing.assert_close(ours, theirs)


def test_the_default_learning_rate_of_sgd_is_torchs():
    assert optimizers.NpuFusedSGD([parameter()]).defaults["lr"] == torch.optim.SGD([parameter()]).defaults["lr"]


@pytest.mark.parametrize("cls", [optimizers.NpuFusedAdam, optimizers.NpuFusedAdamW])
def test_betas_of_a_float_and_a_tensor_are_refused_as_in_torch(cls):
    with pytest.raises(ValueError, match="betas"):
        cls([parameter()], betas=(0.9, torch.tensor(0.999)))
