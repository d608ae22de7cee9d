# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""State tensors that scripts give other memory, or to other parameters, are stepped as in torch.optim."""

import copy
import gc
import weakref

import pytest
import torch
from devices import DEVICE
from optimizer_specs import SPECS
from torch import nn

from apex_npu import optimizers
from apex_npu._extension import extension

RULES = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.1},
    "AdamW": {"lr": 0.1, "amsgrad": True},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adadelta": {"lr": 1.0},
}
rules = pytest.mark.parametrize("name", RULES)


def make(name, count=4):
    """torch's optimizer and ours, on equal parameters of different values."""
    found = []
    for cls in (getattr(torch.optim, name), getattr(optimizers, f"NpuFused{name}")):
        params = [nn.Parameter(torch.full((2, 3), float(i), device=DEVICE)) for i in range(count)]
        found.append((cls(params, **RULES[name]), params))
    return found


def step(optimizer, params, value):
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, value * (i + 1))
    optimizer.step()


def assert_same(one, other):
    torch.testing.assert_close(other[1], one[1], rtol=1e-5, atol=1e-6)
    theirs, ours = (optimizer.state_dict()["state"] for optimizer, _ in (one, other))
    for index, entry in theirs.items():
        for key, value in entry.items():
            torch.testing.assert_close(ours[index][key].cpu(), value.cpu(), rtol=1e-5, atol=1e-6, check_dtype=False)


WRITES = {
    "all moved": lambda state: [setattr(v, "data", v.data.clone()) for entry in state for v in entry.values()],
    "one moved": lambda state: setattr(next(iter(state[1].values())), "data", next(iter(state[1].values())).clone()),
    "moved and zeroed": lambda state: [setattr(v, "data", torch.zeros_like(v)) for v in state[2].values()],
    "set_": lambda state: [v.set_(v.clone()) for v in state[0].values()],
}


@rules
@pytest.mark.parametrize("write", WRITES)
def test_state_that_is_given_other_memory(write, name):
    pair = make(name)
    for optimizer, params in pair:
        step(optimizer, params, 1.0)
        with torch.no_grad():
            WRITES[write]([{k: v for k, v in optimizer.state[p].items() if torch.is_tensor(v)} for p in params])
        for _ in range(3):
            step(optimizer, params, -1.0)
    assert_same(*pair)
    pair = [(copy.deepcopy(optimizer), None) for optimizer, _ in pair]
    pair = [(optimizer, optimizer.param_groups[0]["params"]) for optimizer, _ in pair]
    for optimizer, params in pair:
        params[0].data = params[0].data.clone()
        step(optimizer, params, 1.0)
    assert_same(*pair)


def permuted(state, params):
    old = [state[p] for p in params]
    for p, i in zip(params, (2, 0, 3, 1), strict=True):
        state[p] = old[i]


def values_permuted(state, params):
    old = [dict(state[p]) for p in params]
    for p, i in zip(params, (2, 0, 3, 1), strict=True):
        state[p].update(old[i])


def two_exchanged(state, params):
    state[params[0]], state[params[2]] = state[params[2]], state[params[0]]


@rules
@pytest.mark.parametrize("change", [permuted, values_permuted, two_exchanged])
def test_state_that_is_given_to_other_parameters(change, name):
    pair = make(name)
    for optimizer, params in pair:
        step(optimizer, params[:3], 0.5)
        step(optimizer, params, 1.0)
        change(optimizer.state, params)
        for _ in range(2):
            step(optimizer, params, -1.0)
    assert_same(*pair)


@pytest.mark.skipif(extension is None, reason="without the extension state is not encoded")
@pytest.mark.parametrize("state_dtype", ["int8", torch.bfloat16])
def test_encoded_state_that_is_given_to_other_parameters(state_dtype):
    params = [nn.Parameter(torch.ones(200, device=DEVICE)) for _ in range(4)]
    optimizer = optimizers.NpuFusedAdam(params, lr=0.1, state_dtype=state_dtype)
    step(optimizer, params, 1.0)
    permuted(optimizer.state, params)
    step(optimizer, params, 0.0)
    for p, i in zip(params, (2, 0, 3, 1), strict=True):
        expected = torch.full_like(p, 0.09 * (i + 1))
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].dequantize(), expected, rtol=0.02, atol=0.0)


def zeroed(optimizer):
    for entry in optimizer.state.values():
        entry["step"].zero_()


def assigned(optimizer):
    for entry in list(optimizer.state.values())[1:]:
        entry["step"] = torch.zeros_like(entry["step"])


def loaded(optimizer):
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][1]["step"].zero_()
    optimizer.load_state_dict(state_dict)


RESTARTS = [zeroed, assigned, loaded]


@pytest.mark.parametrize("name", [name for name in RULES if name != "SGD"])  # torch.optim.SGD has no count
@pytest.mark.parametrize("restart", RESTARTS)
def test_counts_that_are_set_to_0_keep_the_moments(restart, name):
    pair = make(name)
    for optimizer, params in pair:
        step(optimizer, params, 1.0)
        step(optimizer, params, 0.5)
        restart(optimizer)
        for value in (-1.0, 0.5):
            step(optimizer, params, value)
    assert_same(*pair)


@pytest.mark.parametrize("restart", RESTARTS)
def test_counts_that_are_set_to_0_before_a_step_that_fails(restart):
    pair = make("Adam")
    for optimizer, params in pair:
        step(optimizer, params, 1.0)
        restart(optimizer)
        optimizer.param_groups[0]["lr"] = "0.1"
        with pytest.raises(TypeError):
            step(optimizer, params, 0.5)
        optimizer.param_groups[0]["lr"] = 0.1
    optimizer, params = pair[1]
    moments = [torch.full_like(p, 0.1 * (i + 1)) for i, p in enumerate(params)]
    torch.testing.assert_close([optimizer.state[p]["exp_avg"] for p in params], moments)
    step(optimizer, params, 0.0)
    torch.testing.assert_close([optimizer.state[p]["exp_avg"] for p in params], [0.9 * m for m in moments])


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize(
    "options", [{"state_dtype": "int8"}, {"store_param_remainders": True}, {"capturable": True}], ids=str
)
def test_counts_that_are_set_to_0_in_other_formats(options, restart):
    if extension is None and "capturable" not in options:
        pytest.skip("without the extension nothing is encoded")
    params = [nn.Parameter(torch.ones(200, device=DEVICE, dtype=torch.bfloat16)) for _ in range(4)]
    optimizer = optimizers.NpuFusedAdam(params, lr=0.1, **options)
    step(optimizer, params, 1.0)
    restart(optimizer)
    step(optimizer, params, 0.0)
    for entry in optimizer.state_dict()["state"].values():
        assert entry["step"].item() in (1.0, 2.0)
    for i, p in enumerate(params):
        found = optimizer.state_dict()["state"][i]["exp_avg"]
        torch.testing.assert_close(found, torch.full_like(p, 0.09 * (i + 1), dtype=torch.float32), rtol=0.02, atol=0.0)


FORMATS = {
    "float32": {},
    "int8": {"state_dtype": "int8"},
    "bfloat16": {"state_dtype": torch.bfloat16},
    "remainders": {"store_param_remainders": True},
    "stochastic": {"stochastic_rounding": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", FORMATS)
@pytest.mark.parametrize("cls", dict.fromkeys(spec.cls for spec in SPECS), ids=lambda cls: cls.__name__)
def test_an_optimizer_that_is_dropped_is_freed_at_once(cls, options, dtype):
    if extension is None and options != "float32":
        pytest.skip("without the extension state is not encoded")
    if issubclass(cls, optimizers.FusedMixedPrecisionLamb):
        pytest.skip("has no formats")

    def used():
        param = nn.Parameter(torch.ones(3, 4, device=DEVICE, dtype=dtype))
        optimizer = cls([param], lr=0.1, **FORMATS[options])
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return weakref.ref(param), weakref.ref(optimizer)

    used()  # torch keeps the first optimizer of a class in a cycle
    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in used()] == [None, None]
    finally:
        gc.enable()
