# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``state_dict(encoded=True)``: states as they are stored, loaded without loss into the same formats."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from devices import DEVICE
from encoded_steps import make_params, params_of
from lockstep import set_grads
from small_programs import step_on
from torch import nn

from apex_npu import amp, optimizers
from apex_npu._extension import extension
from apex_npu.fusion import EncodedView

BF16 = torch.bfloat16
FORMATS = [
    pytest.param(torch.float32, {"state_dtype": BF16}, id="bfloat16"),
    pytest.param(torch.float32, {"state_dtype": "int8"}, id="int8"),
    pytest.param(torch.float32, {"state_dtype": {"exp_avg_sq": BF16}}, id="one state"),
    pytest.param(BF16, {"state_dtype": "int8", "stochastic_rounding": True}, id="stochastic"),
    pytest.param(BF16, {"store_param_remainders": True}, id="remainders"),
    pytest.param(BF16, {"state_dtype": BF16, "store_param_remainders": "int8"}, id="8-bit remainders"),
    pytest.param(torch.float16, {"state_dtype": "int8", "store_param_remainders": "int8"}, id="float16"),
    pytest.param(torch.float16, {"state_dtype": "int8", "store_param_remainders": True}, id="float16, 16 bits"),
]
BYTES_FORMATS = {"state_dtype": "int8", "store_param_remainders": "int8"}


def make(dtype, formats, rule=optimizers.NpuFusedAdamW, seed=0):
    params = make_params(dtype, seed)
    return rule(params, lr=1e-3, **formats), params


def step(optimizer, params, seed, late=False):
    set_grads(params, seed)
    params[1].grad = None if late else params[1].grad
    optimizer.step()


def saved_to_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file), file.getbuffer().nbytes


def is_encoded(value):
    return isinstance(value, dict)


def assert_same(optimizer, other):
    for (_, found), (_, expected) in zip(
        sorted(optimizer.state_dict()["state"].items()), sorted(other.state_dict()["state"].items()), strict=True
    ):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("first", ["parameters", "state"])
@pytest.mark.parametrize(("dtype", "formats"), FORMATS)
def test_what_is_stored_is_loaded_bit_for_bit(dtype, formats, first, late):
    """From a file, in either order with the parameters, also of a parameter that has not been stepped."""
    optimizer, params = make(dtype, formats)
    for seed in range(3):
        step(optimizer, params, seed, late=late)
    state, _ = saved_to_file(optimizer.state_dict(encoded=True))
    values = [p.detach().clone() for p in params]
    other, again = make(dtype, formats, seed=1)
    step(other, again, 9)
    for kind in sorted(["parameters", "state"], key=first.__ne__):
        if kind == "state":
            other.load_state_dict(state)
            continue
        with torch.no_grad():
            for p, value in zip(again, values, strict=True):
                p.copy_(value)
    assert_same(other, optimizer)
    for seed in range(3, 5):
        step(optimizer, params, seed)
        step(other, again, seed)
    assert all(map(torch.equal, params, again))
    assert_same(other, optimizer)


@pytest.mark.parametrize(("dtype", "formats"), FORMATS)
def test_a_state_dict_shows_the_stored_tensors(dtype, formats):
    optimizer, params = make(dtype, formats)
    step(optimizer, params, 0)
    state = optimizer.state_dict(encoded=True)["state"]
    for index, p in enumerate(params):
        for name, shown in optimizer.state[p].items():
            value = state[index][name]
            assert is_encoded(value) == isinstance(shown, EncodedView)
            if not is_encoded(value):
                continue
            assert value["values"].dtype == shown.stored_dtype
            assert value["values"].shape == (p.numel(),)
            nbytes = value["values"].nbytes + (0 if value["scales"] is None else value["scales"].nbytes)
            assert nbytes == shown.nbytes
            assert value["values"].untyped_storage().nbytes() == value["values"].nbytes
    # Later steps do not change what has been saved.
    before = copy.deepcopy(state)
    step(optimizer, params, 1)
    for index, entry in before.items():
        for name, value in entry.items():
            if is_encoded(value):
                assert torch.equal(value["values"], state[index][name]["values"])


def test_files_have_a_quarter_of_the_bytes():
    param = nn.Parameter(torch.randn(1 << 16).to(BF16).to(DEVICE))
    optimizer = optimizers.FusedAdam([param], **BYTES_FORMATS)
    set_grads([param], 0)
    optimizer.step()
    _, plain = saved_to_file(optimizer.state_dict())
    _, encoded = saved_to_file(optimizer.state_dict(encoded=True))
    assert encoded / param.numel() == pytest.approx(3.0625, abs=0.1)
    assert encoded < 0.27 * plain


def test_float32_states_are_as_without_it():
    optimizer, params = make(torch.float32, {})
    step(optimizer, params, 0)
    plain, encoded = optimizer.state_dict(), optimizer.state_dict(encoded=True)
    assert plain["state"].keys() == encoded["state"].keys()
    for index, entry in encoded["state"].items():
        assert all(value is plain["state"][index][name] for name, value in entry.items())


@pytest.mark.parametrize(
    "rule",
    [
        optimizers.FusedAdam,
        optimizers.NpuFusedLamb,
        optimizers.FusedNovoGrad,
        optimizers.NpuFusedMuon,
        optimizers.NpuFusedSGD,
    ],
)
def test_each_kind_of_rule(rule):
    options = {"use_muon": "auto"} if rule is optimizers.NpuFusedMuon else {}
    optimizer, _ = make(BF16, BYTES_FORMATS | options, rule)
    params = params_of(optimizer)
    for seed in range(2):
        step(optimizer, params, seed)
    other = copy.deepcopy(optimizer)
    again = params_of(other)
    step(other, again, 7)
    with torch.no_grad():
        for p, q in zip(again, params, strict=True):
            p.copy_(q)
    other.load_state_dict(optimizer.state_dict(encoded=True))
    step(optimizer, params, 3)
    step(other, again, 3)
    assert all(map(torch.equal, params, again))
    assert_same(other, optimizer)


def test_hooks_see_the_stored_tensors():
    optimizer, params = make(torch.float32, {"state_dtype": "int8"})
    step(optimizer, params, 0)
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, found: seen.append(found["state"][0]["exp_avg"]["values"].dtype))
    optimizer.state_dict(encoded=True)
    assert seen == [torch.int8]


@pytest.mark.skipif(extension is None, reason="amp keeps remainders with the extension")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_under_amp(level):
    def start():
        torch.manual_seed(0)
        model = nn.Linear(20, 30).to(DEVICE)
        optimizer = optimizers.NpuFusedAdamW(model.parameters(), state_dtype="int8")
        options = {"store_param_remainders": "int8", "loss_scale": 64.0, "verbosity": 0}
        return amp.initialize(model, optimizer, opt_level=level, **options)

    def iterate(model, optimizer, seed):
        batch = torch.randn(4, 20, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        step_on(model(batch).float().square().mean(), optimizer)

    model, optimizer = start()
    for seed in range(3):
        iterate(model, optimizer, seed)
    state, _ = saved_to_file({"model": model.state_dict(), "optimizer": optimizer.state_dict(encoded=True)})
    assert "master_param" not in state["optimizer"]["state"][0]
    assert state["optimizer"]["state"][0]["exp_avg"]["values"].dtype == torch.int8
    iterate(model, optimizer, 5)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = start()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    iterate(model, optimizer, 5)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_other_optimizers_under_amp_refuse_the_argument_as_without_amp():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    with pytest.raises(TypeError, match="encoded"):
        optimizer.state_dict(encoded=True)


@pytest.mark.parametrize(
    ("dtype", "formats", "message"),
    [
        (
            BF16,
            {"state_dtype": BF16, "store_param_remainders": "int8"},
            r"'exp_avg' .*int8, .*keeps it as torch.bfloat",
        ),
        (
            BF16,
            {"store_param_remainders": "int8"},
            r"'exp_avg' of parameter 0 is encoded as torch.int8, .*torch.float32",
        ),
        (BF16, {"state_dtype": "int8", "store_param_remainders": True}, r"'master_param' of parameter 0 .*torch.int16"),
        (BF16, {"state_dtype": "int8"}, r"'master_param' of parameter 0 is encoded as torch.int8, .*torch.float32"),
        (torch.float32, BYTES_FORMATS, r"'master_param' of parameter 0 is encoded as torch.int8, .*torch.float32"),
        (torch.float16, BYTES_FORMATS, r"'master_param' of parameter 0 .* of torch.bfloat16, not of torch.float16"),
    ],
)
def test_other_formats_are_refused_by_name_and_nothing_moves(dtype, formats, message):
    optimizer, params = make(BF16, BYTES_FORMATS)
    step(optimizer, params, 0)
    saved = optimizer.state_dict(encoded=True)
    other, again = make(dtype, formats, seed=1)
    step(other, again, 1)
    before = copy.deepcopy((other.state_dict(), again))
    with pytest.raises(ValueError, match=rf"NpuFusedAdamW for these parameters: .*{message}.*Nothing has been loaded"):
        other.load_state_dict(saved)
    assert all(map(torch.equal, again, before[1]))
    for index, entry in other.state_dict()["state"].items():
        assert all(torch.equal(value, before[0]["state"][index][name]) for name, value in entry.items())


@pytest.mark.parametrize("late", [False, True], ids=["changed", "late group"])
@pytest.mark.parametrize(("before", "after"), [(1e-8, 1e-14), (1e-14, 1e-8)])
def test_between_a_change_of_eps_and_the_next_step_states_are_saved(before, after, late):
    """In a format that the loading optimizer, which has the new eps, accepts; the next steps are the same."""
    optimizer, params = make(torch.float32, {"state_dtype": "int8", "eps": before})
    step(optimizer, params, 0)
    if late:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5, device=DEVICE))], "eps": after})
    else:
        optimizer.param_groups[0]["eps"] = after
    state, _ = saved_to_file(optimizer.state_dict(encoded=True))
    other, again = make(torch.float32, {"state_dtype": "int8"}, seed=1)
    if late:
        other.add_param_group({"params": [nn.Parameter(torch.ones(5, device=DEVICE))]})
    other.load_state_dict(state)
    with torch.no_grad():
        for p, value in zip(again, params, strict=True):
            p.copy_(value)
    for seed in (1, 2):
        step(optimizer, params, seed)
        step(other, again, seed)
    assert all(map(torch.equal, params, again))
    assert other.state_dtype == optimizer.state_dtype
    assert is_encoded(optimizer.state_dict(encoded=True)["state"][0]["exp_avg"])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stride", (1, 37), r"for shape \(37, 9\) and strides \(1, 37\), not \(37, 9\) and \(9, 1\)"),
        ("shape", (9, 37), r"for shape \(9, 37\)"),
        ("values", torch.zeros(7, dtype=torch.int8), "for shape"),
        ("values", None, "encoded as None"),
        ("scales", None, "other scales than 3 float32 numbers"),
        ("scales", torch.zeros(2), "other scales than 3 float32 numbers"),
        ("scales", torch.zeros(3, dtype=torch.float64), "other scales than 3 float32 numbers"),
    ],
)
def test_damaged_states_are_refused_and_nothing_moves(key, value, message):
    optimizer, params = make(BF16, BYTES_FORMATS)
    step(optimizer, params, 0)
    saved, before = optimizer.state_dict(encoded=True), copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"][key] = value
    with pytest.raises(ValueError, match=rf"{message}.*Nothing has been loaded"):
        optimizer.load_state_dict(saved)
    for index, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(kept, before["state"][index][name]) for name, kept in entry.items())


def test_optimizers_of_torch_refuse_encoded_states():
    """They would step with them; torch checks no names."""
    optimizer, params = make(torch.float32, {"state_dtype": "int8"})
    step(optimizer, params, 0)
    other = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in params])
    other.load_state_dict(optimizer.state_dict(encoded=True))
    for p in other.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    with pytest.raises((TypeError, AttributeError, RuntimeError)):
        other.step()
