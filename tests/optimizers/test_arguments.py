# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arguments and states that torch's optimizers accept, or refuse."""

import inspect
import math

import pytest
import torch
from devices import DEVICE, needs
from small_programs import X, vector
from torch import nn

from apex_npu import optimizers

pytestmark = pytest.mark.device


def parameter():
    return nn.Parameter(torch.ones(3, device=DEVICE))


def matrix():
    """For Muon, too."""
    return nn.Parameter(parameter().detach()[None])


FUSED = {
    name: cls
    for name, cls in vars(optimizers).items()
    if isinstance(cls, type) and issubclass(cls, optimizers.FusedOptimizer) and cls is not optimizers.FusedOptimizer
}


@needs("inf")  # torch's GradScaler finds overflows by it
@pytest.mark.parametrize("name", FUSED)
def test_every_fused_optimizer_takes_fuse_grad_scaler(name):
    param, other = matrix(), matrix()
    optimizer = FUSED[name]([param], lr=0.1, fuse_grad_scaler=True)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=64.0)
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


SAME_RULE = ("SGD", "Adam", "AdamW", "RMSprop", "Adadelta", *(["Muon"] if hasattr(torch.optim, "Muon") else []))


@pytest.mark.parametrize("name", SAME_RULE)
def test_a_call_of_torchs_optimizer_need_not_be_changed(name):
    theirs, ours = getattr(torch.optim, name), getattr(optimizers, f"NpuFused{name}")
    arguments = {p.name: p.default for p in list(inspect.signature(theirs).parameters.values())[1:]}
    one, other, twin = (matrix() for _ in range(3))
    made = {
        one: theirs([one], **arguments),
        other: ours([other], **arguments),
        twin: ours([twin], fused=True, foreach=True, differentiable=False),
    }
    for param, optimizer in made.items():
        (param * vector(*X)).sum().backward()
        optimizer.step()
    assert torch.equal(other, twin)
    if name != "Muon":  # whose products are bfloat16's
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", SAME_RULE)
def test_torchs_arguments_that_ask_for_more_are_refused(name):
    cls = getattr(optimizers, f"NpuFused{name}")
    with pytest.raises(ValueError, match=rf"NpuFused{name}: differentiable=True.*torch\.optim"):
        cls([matrix()], differentiable=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'fuzed'"):
        cls([matrix()], fuzed=True)
    optimizer = cls([matrix()])
    with pytest.raises(ValueError, match=f"NpuFused{name}: differentiable=True"):
        optimizer.add_param_group({"params": [matrix()], "differentiable": True})
    assert len(optimizer.param_groups) == 1


def test_adam_names_the_class_with_a_decoupled_decay():
    with pytest.raises(ValueError, match=r"NpuFusedAdam: decoupled_weight_decay=True.*NpuFusedAdamW"):
        optimizers.NpuFusedAdam([parameter()], decoupled_weight_decay=True)


def test_the_default_learning_rate_of_sgd_is_torchs():
    assert optimizers.NpuFusedSGD([parameter()]).defaults["lr"] == torch.optim.SGD([parameter()]).defaults["lr"]


@pytest.mark.parametrize("cls", [optimizers.NpuFusedAdam, optimizers.NpuFusedAdamW])
def test_betas_of_a_float_and_a_tensor_are_refused_as_in_torch(cls):
    with pytest.raises(ValueError, match="betas"):
        cls([parameter()], betas=(0.9, torch.tensor(0.999)))
