# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""State dicts of torch.optim: continued, or refused where their options ask for another rule."""

import copy
from typing import Any

import pytest
import torch
from devices import DEVICE
from torch import nn

from apex_npu import optimizers


def stepped(cls: Any, **options: Any) -> tuple[nn.Parameter, Any]:
    param = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = cls([param], lr=0.1, **options)
    for _ in range(2):
        step(param, optimizer)
    return param, optimizer


def step(param: nn.Parameter, optimizer: Any) -> None:
    param.grad = torch.tensor([1.0, -2.0, 0.5], device=DEVICE)
    optimizer.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"lr_decay": 0.5}, {"initial_accumulator_value": 2.0}, {"lr_decay": 0.1, "weight_decay": 0.1}],
    ids=str,
)
def test_adagrad_goes_from_torch_to_ours_and_back(options: Any) -> None:
    theirs, reference = stepped(torch.optim.Adagrad, **options)
    ours = nn.Parameter(theirs.detach().clone())
    fused = optimizers.FusedAdagrad([ours], lr=0.3)
    fused.load_state_dict(reference.state_dict())
    for _ in range(2):
        step(theirs, reference)
        step(ours, fused)
    torch.testing.assert_close(ours, theirs)
    back = nn.Parameter(ours.detach().clone())
    again = torch.optim.Adagrad([back], lr=0.3)
    again.load_state_dict(fused.state_dict())
    step(back, again)
    step(theirs, reference)
    torch.testing.assert_close(back, theirs)


def test_a_group_of_adagrad_starts_at_the_value_that_torchs_has() -> None:
    theirs, _ = stepped(torch.optim.Adagrad, initial_accumulator_value=2.0)
    param = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = optimizers.FusedAdagrad([{"params": [param], "initial_accumulator_value": 2.0}], lr=0.1)
    for _ in range(2):
        step(param, optimizer)
    torch.testing.assert_close(param, theirs)


REFUSED = {
    "maximize": (torch.optim.Adagrad, {"maximize": True}, optimizers.FusedAdagrad, "maximize=True"),
    "maximize, Adam": (torch.optim.Adam, {"maximize": True}, optimizers.FusedAdam, "maximize=True"),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}, optimizers.FusedAdam, "amsgrad=True"),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}, optimizers.NpuFusedAdam, "NpuFusedAdamW"),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}, optimizers.NpuFusedAdamW, "requires NpuFusedAdam"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_option_of_another_rule_is_refused(case: str) -> None:
    theirs, options, ours, text = REFUSED[case]
    _, reference = stepped(theirs, **options)
    if case.startswith("Adam") and "decoupled_weight_decay" not in reference.param_groups[0]:
        pytest.skip("this torch's state dicts do not tell AdamW from Adam")
    param, optimizer = stepped(ours)
    before = param.detach().clone()
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(reference.state_dict())
    assert torch.equal(param, before)
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_a_groups_step_that_is_no_count_is_refused() -> None:
    _, optimizer = stepped(optimizers.FusedAdam)
    state = optimizer.state_dict()
    state["param_groups"][0]["step"] = 1.5
    with pytest.raises(ValueError, match=r"'step' of a group is 1\.5, not a count"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("saved_by", ["NVIDIA", "torch"])
@pytest.mark.parametrize(
    "cls",
    [
        optimizers.FusedAdam,
        optimizers.FusedLAMB,
        optimizers.FusedMixedPrecisionLamb,
        optimizers.NpuFusedAdamW,
        optimizers.NpuFusedLamb,
    ],
)
def test_a_groups_step_count_is_not_kept_beside_newer_ones(cls: Any, saved_by: str) -> None:
    """NVIDIA's optimizers save only that of the group. torch.optim loads it, and does not increment it."""
    source_param, source = stepped(cls)
    saved = copy.deepcopy(source.state_dict())
    if saved_by == "NVIDIA":
        saved["param_groups"][0]["step"] = int(saved["state"][0].pop("step"))
    else:
        saved["param_groups"][0]["step"] = 1
    param = nn.Parameter(source_param.detach().clone())
    optimizer = cls([param], lr=0.3)
    optimizer.load_state_dict(saved)
    for count in (2, 3):
        state = optimizer.state_dict()
        assert state["state"][0]["step"] == count
        assert state["param_groups"][0].get("step", count) == count
        assert ("step" in state["param_groups"][0]) == ("step" in source.state_dict()["param_groups"][0])
        step(param, optimizer)
        step(source_param, source)
        assert torch.equal(param, source_param)


@pytest.mark.parametrize("numbers", [range(200), range(1000, 1200), range(199, -1, -1)], ids=str)
def test_loading_many_parameters_compares_few_of_their_numbers(numbers: range) -> None:
    """torch's own loading searches the list of a group for each tensor of state."""
    compared = 0

    class Number(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    def make() -> tuple[list[nn.Parameter], optimizers.NpuFusedAdam]:
        params = [nn.Parameter(torch.full((2,), float(i), device=DEVICE)) for i in range(200)]
        return params, optimizers.NpuFusedAdam(params)

    params, source = make()
    for i, param in enumerate(params):
        param.grad = torch.full_like(param, i + 1.0)
    source.step()
    saved = source.state_dict()
    state = {numbers[i]: entry for i, entry in saved["state"].items()}
    groups = [{**saved["param_groups"][0], "params": list(map(Number, numbers))}]
    others, target = make()
    target.load_state_dict({"state": state, "param_groups": groups})
    assert type(groups[0]["params"]) is list
    for param, other in zip(params, others, strict=True):
        assert target.state[other]["exp_avg"].tolist() == source.state[param]["exp_avg"].tolist()
    if numbers.step == 1:
        assert compared < 10 * len(numbers)
