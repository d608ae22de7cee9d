# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What only NovoGrad has: one number of state for each parameter, which NVIDIA keeps elsewhere."""

import copy

import pytest
import torch
from devices import DEVICE
from lockstep import assert_equal_params, set_grads
from reference_optimizers import NvidiaNovoGrad
from torch import nn

from apex_npu.optimizers import FusedNovoGrad, NpuFusedAdam

pytestmark = pytest.mark.device

SHAPES = [(4, 3), (5,), (2,), (3,), ()]
DTYPES = [torch.float32, torch.float16, torch.float32, torch.float16, torch.float32]
UNUSED = 2


def make_params():
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype))
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def step(params, optimizer, number):
    set_grads(params, number, without=[UNUSED])
    optimizer.step()


def as_nvidia(state_dict, params):
    """The state dict of NVIDIA's FusedNovoGrad for the same course of training."""
    saved = copy.deepcopy(state_dict)
    for group in saved["param_groups"]:
        norms = {torch.float16: [], torch.float32: []}
        for index in group["params"]:
            entry = saved["state"].get(index)
            if entry:
                norms[params[index].dtype].append(entry.pop("exp_avg_sq").float().reshape(1))
                group["step"] = int(entry.pop("step"))
                entry["exp_avg"] = entry["exp_avg"].to(params[index].dtype)
        group["exp_avg_sq"] = [torch.cat(n) if n else torch.empty(0) for n in norms.values()]
    return saved


@pytest.mark.parametrize("norm_type", [2, 0])
@pytest.mark.parametrize("one_group", [True, False])
def test_nvidias_state_dict_is_read(one_group, norm_type):
    def groups(params):
        return [{"params": params}] if one_group else [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]

    theirs, ours = make_params(), make_params()
    reference = NvidiaNovoGrad(groups(theirs), lr=0.05, weight_decay=0.01, norm_type=norm_type)
    for i in range(4):
        step(theirs, reference, i)
    optimizer = FusedNovoGrad(groups(ours), lr=1.0)
    optimizer.load_state_dict(as_nvidia(reference.state_dict(), theirs))
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q)
        if q in reference.state:  # NVIDIA's has float16 moments for float16 parameters
            reference.state[q]["exp_avg"] = reference.state[q]["exp_avg"].to(q.dtype)
    for i in range(4, 7):
        step(theirs, reference, i)
        step(ours, optimizer, i)
    assert_equal_params(ours, theirs, 5e-6)
    state = optimizer.state_dict()
    assert {float(entry["step"]) for entry in state["state"].values()} == {7.0}
    assert not any("exp_avg_sq" in group for group in state["param_groups"])
    FusedNovoGrad(groups(make_params()), lr=1.0).load_state_dict(state)


def test_norms_that_do_not_fit_are_refused():
    params = make_params()
    optimizer = FusedNovoGrad(params)
    step(params, optimizer, 0)
    saved = as_nvidia(optimizer.state_dict(), params)
    saved["param_groups"][0]["exp_avg_sq"][1] = torch.ones(5)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"for 2 float16 and 5 float32 parameters, but 2 and 2 of them have state"):
        optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before["state"][0]["exp_avg"])


@pytest.mark.parametrize("source", [NpuFusedAdam, FusedNovoGrad])
def test_adams_second_moment_is_not_novograds(source):
    target = FusedNovoGrad if source is NpuFusedAdam else NpuFusedAdam
    params = make_params()
    optimizer = source(params)
    step(params, optimizer, 0)
    with pytest.raises(ValueError, match=r"'exp_avg_sq' of parameter 0 has shape .*Nothing has been loaded"):
        target(make_params()).load_state_dict(optimizer.state_dict())


def test_gradients_of_empty_parameters_alone():
    params = [nn.Parameter(torch.ones(3, device=DEVICE)), nn.Parameter(torch.ones(0, device=DEVICE))]
    optimizer = FusedNovoGrad(params, norm_type=0)
    params[1].grad = torch.ones(0, device=DEVICE)
    optimizer.step()
    assert params[0].tolist() == [1, 1, 1]
    assert optimizer.state[params[1]]["exp_avg_sq"].item() == 0
