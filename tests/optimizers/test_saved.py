# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""State dicts and pickles of whole optimizers, written by earlier versions, load bit for bit and step on."""

import pickle
from pathlib import Path

import pytest
import torch
from devices import DEVICE
from optimizers.write_saved import CASES, give_gradients, parameters

from apex_npu import optimizers

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the saved files hold CPU tensors")
FOLDER = Path(__file__).parent / "saved_0_1"


def saved(file):
    return torch.load(FOLDER / f"{file}.pt", weights_only=False)


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def assert_same_state(got, expected):
    assert_same(got["state"], expected["state"])
    # Groups may have options by now that the saved ones lack: what is there is kept.
    for group, saved_group in zip(got["param_groups"], expected["param_groups"], strict=True):
        assert {name: group[name] for name in saved_group} == saved_group


def step_on(params, optimizer):
    give_gradients(params, 3)
    optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("file", CASES)
def test_whole_optimizers(file):
    found = saved(file)
    params, optimizer = pickle.loads(found["pickle"])
    assert type(optimizer) is getattr(optimizers, CASES[file][0])
    assert_same([p.detach() for p in params], found["params"])
    assert_same_state(optimizer.state_dict(), found["state_dict"])
    torch.testing.assert_close(step_on(params, optimizer), found["next_params"])


@pytest.mark.parametrize("file", CASES)
def test_state_dicts(file):
    found, (name, options) = saved(file), CASES[file]
    params = parameters(found["params"][0].dtype)
    for param, value in zip(params, found["params"], strict=True):
        param.data.copy_(value)
    optimizer = getattr(optimizers, name)([{"params": params[:2]}, {"params": params[2:]}], **options)
    optimizer.load_state_dict(found["state_dict"])
    assert_same_state(optimizer.state_dict(), found["state_dict"])
    pickled_params, pickled = pickle.loads(found["pickle"])
    assert_same(step_on(params, optimizer), step_on(pickled_params, pickled))
    assert_same_state(optimizer.state_dict(), pickled.state_dict())
