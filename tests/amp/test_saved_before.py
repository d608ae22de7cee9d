# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What earlier versions have saved, state dicts and whole objects, loads bit for bit and trains on."""

import gzip
import pickle

import pytest
import torch
from saved_by_amp.write import FILE, LEVELS, NAMES, numbers, trained
from torch.utils._pytree import tree_flatten

from apex_npu import amp

CASES = [
    (name, level, fuse) for name in NAMES for level in LEVELS for fuse in (False, True) if level == "O2" or not fuse
]
# torch's own load_state_dict rounds the state of float16 parameters, as the unfused Lamb has them at O3.
ROUNDED = ("Lamb", "O3", False)


@pytest.fixture(scope="module")
def saved():
    with gzip.open(FILE) as file:
        return pickle.load(file)


def assert_same(found, expected):
    found, expected = tree_flatten(found), tree_flatten(expected)
    assert found[1] == expected[1]
    for a, b in zip(found[0], expected[0], strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)
        else:
            assert a == b


def train_on(model, optimizer):
    before = [p.detach().clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(1)
    with amp.scale_loss(model(torch.randn(8, 3, generator=generator)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert amp.last_step(optimizer).applied
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return [p.detach().clone() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize(("name", "level", "fuse"), CASES)
def test_a_pickle_of_model_and_optimizer(saved, name, level, fuse):
    pickled, expected = saved[name, level, fuse]
    trained(name, level, fuse_unscale=fuse)  # a session, as the script that loads has one
    amp.load_state_dict(expected["amp"])
    model, optimizer = pickle.loads(pickled)
    assert_same(numbers(model, optimizer), expected)
    train_on(model, optimizer)


@pytest.mark.parametrize(("name", "level", "fuse"), [case for case in CASES if case != ROUNDED])
def test_state_dicts(saved, name, level, fuse):
    pickled, expected = saved[name, level, fuse]
    model, optimizer = trained(name, level, fuse_unscale=fuse)
    with torch.no_grad():
        for p in amp.master_params(optimizer):
            p.zero_()
    model.load_state_dict(expected["model"])
    optimizer.load_state_dict(expected["optimizer"])
    amp.load_state_dict(expected["amp"])
    found = numbers(model, optimizer)
    # Groups may have options by now that the saved ones lack: what is there is kept.
    groups = zip(found["optimizer"]["param_groups"], expected["optimizer"]["param_groups"], strict=True)
    found["optimizer"]["param_groups"] = [{name: group[name] for name in saved_group} for group, saved_group in groups]
    assert_same(found, expected)
    after = train_on(model, optimizer)
    assert_same(after, train_on(*pickle.loads(pickled)))
