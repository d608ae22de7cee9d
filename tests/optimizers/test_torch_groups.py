# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The groups of optimizers that have torch's rule have torch's keys: torch.distributed.checkpoint looks for them."""

import copy

import pytest
import torch
from devices import DEVICE
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from apex_npu import optimizers

PAIRS = [
    (optimizers.NpuFusedSGD, torch.optim.SGD, {"momentum": 0.9}),
    (optimizers.NpuFusedAdam, torch.optim.Adam, {}),
    (optimizers.NpuFusedAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    (optimizers.NpuFusedRMSprop, torch.optim.RMSprop, {"momentum": 0.9}),
    (optimizers.NpuFusedAdadelta, torch.optim.Adadelta, {}),
]
pairs = pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS, ids=[ours.__name__ for ours, *_ in PAIRS])


def stepped(cls, options, lr=0.1):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(DEVICE)
    optimizer = cls(model.parameters(), lr=lr, **options)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.tensor([[1.0, 2.0, 3.0]], device=DEVICE)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pairs
def test_groups_have_torchs_keys(ours, theirs, options):
    (own,), (expected,) = (stepped(cls, options)[1].param_groups for cls in (ours, theirs))
    assert own.keys() == expected.keys()
    for name in expected.keys() - {"params"}:
        assert own[name] == expected[name], name


@pairs
def test_an_optimizer_is_made_from_the_defaults_of_another(ours, theirs, options):
    model, optimizer = stepped(ours, options)
    again = type(optimizer)(model.parameters(), **optimizer.defaults)
    assert again.defaults == optimizer.defaults


def test_what_a_state_dict_says_of_the_decay_is_the_optimizers_own():
    """Without weight decay Adam's state is AdamW's; with some later on, what is saved is AdamW's."""
    _, first = stepped(optimizers.NpuFusedAdam, {})
    model, second = stepped(optimizers.NpuFusedAdamW, {"weight_decay": 0.0})
    second.load_state_dict(first.state_dict())
    second.param_groups[0]["weight_decay"] = 0.1
    step(model, second)
    _, third = stepped(optimizers.NpuFusedAdamW, {"weight_decay": 0.1})
    third.load_state_dict(second.state_dict())
    assert third.param_groups[0]["weight_decay"] == 0.1


@pairs
def test_an_earlier_state_dict_without_them_loads(ours, theirs, options):
    _, optimizer = stepped(ours, options)
    state = copy.deepcopy(optimizer.state_dict())
    for name in ("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
        state["param_groups"][0].pop(name, None)
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    optimizer.load_state_dict(state)
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == before


# torch's own SGD fails there: "Expected device to be set".
@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS[1:], ids=[ours.__name__ for ours, *_ in PAIRS[1:]])
@pytest.mark.parametrize("into_torch", [True, False])
def test_whole_states_pass_from_one_to_the_other(ours, theirs, options, into_torch):
    source, target = (ours, theirs) if into_torch else (theirs, ours)
    whole = StateDictOptions(full_state_dict=True)
    first = stepped(source, options)
    model_state, state = copy.deepcopy(get_state_dict(*first, options=whole))  # torch's optimizers would share it
    second = stepped(target, {}, lr=0.3)
    set_state_dict(*second, model_state_dict=model_state, optim_state_dict=state, options=whole)
    for model, optimizer in (first, second):
        step(model, optimizer)
    torch.testing.assert_close([*first[0].parameters()], [*second[0].parameters()], rtol=1e-6, atol=1e-7)


@pairs
def test_what_is_saved_by_name_loads_into_torchs(ours, theirs, options):
    """With flattened states torch asks for each key of its own groups."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    first, second = stepped(ours, options), stepped(theirs, {}, lr=0.3)
    model_state, state = get_state_dict(*first, options=flat)
    set_state_dict(*second, model_state_dict=model_state, optim_state_dict=state, options=flat)
    assert second[1].param_groups[0]["lr"] == 0.1
