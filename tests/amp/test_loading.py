# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``load_state_dict`` gives masters the values that the model gets, however it gets them.

What is saved is right on any device.
"""

import pytest
import torch
from devices import DEVICE
from small_programs import (
    LEVELS,
    Weights,
    assert_values,
    levels,
    start,
    train_step,
)
from torch import nn

from apex_npu import amp


class Single(nn.Module):
    """One parameter of any shape, with gradient 1."""

    def __init__(self, shape=(3,)):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape, device=DEVICE))

    def forward(self, x):
        return (self.weight * x.reshape(-1)[0]).sum()


class LoadsByItself(Single):
    """Saved under another name, as a logarithm."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "log2"] = self.weight.detach().float().log2()

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "log2"].exp2())


class LoadsUncounted(Single):
    """Writes to its parameter in a way that autograd does not count."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.weight.data.copy_(state_dict[prefix + "kept"])


def load_and_train(model, state, level, prepare=lambda model: None):
    """One step of 1 from what was loaded."""
    model, optimizer = start(model, level=level)
    prepare(model)
    model.load_state_dict(state)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    return model, optimizer


def double_on_load(model):
    def double(module, state_dict, prefix, *_):
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2

    model.register_load_state_dict_pre_hook(double)


@pytest.mark.parametrize("before", [False, True])
@levels(LEVELS)
def test_a_hook_that_changes_the_values(level, before):
    """Registered before ``initialize``, or after it."""
    model = Single()
    if before:
        double_on_load(model)
    state = {"weight": torch.full((3,), 4.0)}
    model, optimizer = load_and_train(model, state, level, lambda model: before or double_on_load(model))
    assert_values(model.parameters(), 7.0)
    assert_values(amp.master_params(optimizer), 7.0)


@pytest.mark.parametrize("shape", [(), (1,)])
@levels(LEVELS)
def test_a_parameter_without_dims(level, shape):
    _, optimizer = load_and_train(Single(()), {"weight": torch.full(shape, 5.0)}, level)
    assert_values(amp.master_params(optimizer), 4.0)


@levels(LEVELS)
def test_a_class_that_loads_by_itself(level):
    model, optimizer = load_and_train(LoadsByItself(), {"log2": torch.full((3,), 3.0)}, level)
    assert_values(amp.master_params(optimizer), 7.0)
    model.load_state_dict({"log2": torch.full((3,), 5.0)})  # in the middle of a training
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    assert_values(amp.master_params(optimizer), 31.0)


@levels(LEVELS)
def test_the_state_of_a_model_that_is_moved_to_the_host_is_saved(level, tmp_path):
    exact = 1.0 + 5 * 2.0**-20
    model, optimizer = start(Weights(exact), level=level, lr=2.0**-20)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    torch.save(model.cpu().state_dict(), tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt")
    assert {t.device.type for t in saved.values()} == {"cpu"}
    assert_values(saved.values(), exact - 2.0**-20)


@levels(LEVELS)
def test_what_has_been_written_to_masters_that_are_not_loaded_stays(level):
    model, optimizer = start(Weights(1.0, 2.0), level=level)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    with torch.no_grad():
        list(amp.master_params(optimizer))[1].fill_(7.0)
    model.load_state_dict({"w.0": torch.full((3,), 5.0)}, strict=False)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    assert_values(model.parameters(), 4.0, 6.0)
    assert_values(amp.master_params(optimizer), 4.0, 6.0)


@levels(LEVELS)
def test_what_a_module_loads_uncounted_after_steps_counts(level):
    model, optimizer = start(LoadsUncounted(), level=level)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    model.load_state_dict({"kept": torch.full((3,), 5.0)}, strict=False)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    assert_values([*model.parameters(), *amp.master_params(optimizer)], 4.0, 4.0)
