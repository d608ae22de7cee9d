# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``load_weights``: every form in which a checkpoint has a model's weights, and those that do not fit."""

import argparse
import fractions
import importlib.metadata
import json

import pytest
import torch
from devices import DEVICE
from torch import nn

from apex_npu import amp, export, optimizers


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def other_weights() -> dict[str, torch.Tensor]:
    """Of ``make()``, but of no model that a test makes."""
    torch.manual_seed(7)
    return make().state_dict()


def prefixed(state, prefix):
    return {prefix + name: value for name, value in state.items()}


def assert_loaded(model, expected):
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name].cpu(), value), name


SHAPES = {
    "alone": lambda state: state,
    "entry": lambda state: {"epoch": 3, "arch": "net", "state_dict": state, "best": torch.tensor(0.5), "lr": [0.1]},
    "nested": lambda state: {"run": {"model": state}, "optimizer": {"state": {}, "param_groups": []}},
    "data parallel": lambda state: {"model": prefixed(state, "module.")},
    "compiled": lambda state: prefixed(state, "module._orig_mod."),
    "Lightning": lambda state: {"epoch": 3, "state_dict": prefixed(state, "model.")},
    "compiled in Lightning": lambda state: {"state_dict": prefixed(state, "model._orig_mod.")},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["run.pth", "run.pth.tar"])
def test_all_forms_of_torch_save(tmp_path, shape, name):
    torch.save(SHAPES[shape](other_weights()), tmp_path / name)
    model = make()
    assert export.load_weights(model, tmp_path / name) is model
    assert_loaded(model, other_weights())


def test_the_format_before_torch_1_6(tmp_path):
    torch.save(other_weights(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert_loaded(export.load_weights(make(), tmp_path / "old.pth"), other_weights())


def test_safetensors(tmp_path):
    save_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file
    save_file(prefixed(other_weights(), "module."), tmp_path / "net.safetensors")
    assert_loaded(export.load_weights(make(), str(tmp_path / "net.safetensors")), other_weights())


def test_arguments_and_metrics_beside_the_weights(tmp_path):
    torch.save({"state_dict": other_weights(), "args": argparse.Namespace(lr=0.1)}, tmp_path / "run.pth")
    assert_loaded(export.load_weights(make(), tmp_path / "run.pth"), other_weights())


def in_shards(tmp_path, **changed):
    """Two files, and the index that names them."""
    weights = other_weights()
    places = {name: f"net-{i % 2}.bin" for i, name in enumerate(weights)}
    for file in set(places.values()):
        torch.save({name: value for name, value in weights.items() if places[name] == file}, tmp_path / file)
    index = tmp_path / "net.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places | changed}))
    return index


def test_an_index_of_shards(tmp_path):
    assert_loaded(export.load_weights(make(), in_shards(tmp_path)), other_weights())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": "net-2.bin"}, r"net\.bin\.index\.json names net-2\.bin, which is not beside it: copy all shards"),
        ({"x": "../net.bin"}, r"net\.bin\.index\.json is not an index of shards, .*\(ValueError: Invalid name"),
        ({"x": "net.bin.index.json"}, r"net\.bin\.index\.json is not an index of shards"),
        ({"x": 3}, r"net\.bin\.index\.json is not an index of shards"),
    ],
    ids=["missing", "outside", "itself", "number"],
)
def test_a_broken_index_of_shards(tmp_path, changed, words):
    model = make()
    with pytest.raises(export.CheckpointError, match=words):
        export.load_weights(model, in_shards(tmp_path, **changed))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(export.CheckpointError, match=r'config\.json is not an index of shards, .* in "weight_map"'):
        export.load_weights(model, tmp_path / "config.json")


def test_a_model_inside_of_a_wrapper(tmp_path):
    torch.save(other_weights(), tmp_path / "run.pth")
    wrapped = nn.DataParallel(make())
    export.load_weights(wrapped, tmp_path / "run.pth")
    assert_loaded(wrapped.module, other_weights())


def test_a_model_that_is_called_module(tmp_path):
    model = nn.Module()
    model.module = make()
    expected = prefixed(other_weights(), "module.")
    torch.save(prefixed(expected, "module."), tmp_path / "run.pth")
    assert_loaded(export.load_weights(model, tmp_path / "run.pth"), expected)


def test_a_key_chooses(tmp_path):
    ema = {name: value + 1 for name, value in other_weights().items()}
    torch.save({"state_dict": other_weights(), "averages": {"ema": ema}}, tmp_path / "run.pth")
    assert_loaded(export.load_weights(make(), tmp_path / "run.pth", key="averages.ema"), ema)
    assert_loaded(export.load_weights(make(), tmp_path / "run.pth", key="state_dict"), other_weights())


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_masters_get_the_weights_as_they_are(tmp_path, level):
    torch.save({"model": other_weights()}, tmp_path / "run.pth")
    model = make().to(DEVICE)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    export.load_weights(model, tmp_path / "run.pth")
    if level == "O3":  # which has no others
        assert torch.equal(model[0].weight.cpu(), other_weights()["0.weight"].half())
    else:
        assert_loaded(model, other_weights())


def without(name):
    return {key: value for key, value in other_weights().items() if key != name}


def saved(checkpoint):
    """Writes ``checkpoint`` to a path."""
    return lambda path: torch.save(checkpoint, path)


BROKEN = {
    "missing file": (lambda path: None, r"broken\.pth: there is no such file"),
    "folder": (lambda path: path.mkdir(), r"broken\.pth is a folder"),
    "empty": (lambda path: path.write_bytes(b""), r"not a complete checkpoint .*EOFError"),
    "text": (lambda path: path.write_text("weights"), "not a complete checkpoint"),
    "cut off": (
        lambda path: (torch.save(other_weights(), path), path.write_bytes(path.read_bytes()[:900])),
        "not a complete checkpoint",
    ),
    "objects": (
        saved({"args": fractions.Fraction(1, 3), "model": other_weights()}),
        r"objects .*\(fractions\.Fraction\)",
    ),
    "a whole module": (saved(make()), r"objects .*torch\.nn\.modules\.\w+"),
    "no weights": (saved({"epoch": 3, "lr": 0.1}), r"dict with 'epoch', 'lr'$"),
    "a list": (saved([1, 2]), "no weights .* list"),
    "an optimizer alone": (saved(torch.optim.SGD(make().parameters(), lr=1).state_dict()), "no weights"),
    "two models": (saved({"G": other_weights(), "D": other_weights()}), r"2 models \('G', 'D'\): pass key="),
    "missing names": (saved(without("2.bias")), r"does not fit Sequential, .*: 1 missing \(2\.bias\)$"),
    "unexpected names": (
        saved({"net": other_weights() | {"3.bias": torch.ones(1)}}),
        r"checkpoint\['net'\] does not fit Sequential, .*: 1 unexpected \(3\.bias\)$",
    ),
    "other shapes": (
        saved(other_weights() | {"2.bias": torch.ones(5), "0.bias": 3.0}),
        r"2 of another shape \(0\.bias is float, not \[4\], 2\.bias is \[5\], not \[2\]\)$",
    ),
    "another model": (
        saved(nn.Conv2d(1, 2, 3).state_dict()),
        r"8 missing \(0\.weight, 0\.bias, .* and 3 more\); 2 unexpected \(weight, bias\)$",
    ),
    "a prefix before most names": (
        saved(prefixed(other_weights(), "model.") | {"loss.weight": torch.ones(2)}),
        r"8 missing .*; 10 unexpected \(model\.0\.weight, ",
    ),
    "a part of the names after a prefix": (saved(prefixed(without("2.bias"), "model.")), r": 1 missing \(2\.bias\)$"),
    "two models of one key": (saved({"a.b": other_weights(), "a": {"b": other_weights()}}), "2 models .*: pass key="),
    "some names with a prefix": (
        saved(prefixed(without("2.bias"), "module.") | {"2.bias": torch.ones(2)}),
        r"7 missing .*; 8 unexpected \(module\.0\.weight, ",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_checkpoints_are_refused(tmp_path, kind):
    write, message = BROKEN[kind]
    path = tmp_path / "broken.pth"
    write(path)
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(export.CheckpointError, match=message) as caught:
        export.load_weights(model, path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_loaded(model, before)


def test_a_key_that_is_not_there(tmp_path):
    torch.save({"model": other_weights()}, tmp_path / "run.pth")
    with pytest.raises(export.CheckpointError, match=r"no weights at key='ema', but at 'model'"):
        export.load_weights(make(), tmp_path / "run.pth", key="ema")


def test_a_key_of_two_models(tmp_path):
    torch.save({"a.b": other_weights(), "a": {"b": other_weights()}, "c": other_weights()}, tmp_path / "run.pth")
    message = r"key='a\.b' is the name of 2 models \(checkpoint\['a\.b'\], checkpoint\['a'\]\['b'\]\): save one of them"
    with pytest.raises(export.CheckpointError, match=message):
        export.load_weights(make(), tmp_path / "run.pth", key="a.b")
    assert_loaded(export.load_weights(make(), tmp_path / "run.pth", key="c"), other_weights())


def tied() -> nn.ModuleDict:
    """An embedding that is the output layer, too, as in language models."""
    model = nn.ModuleDict({"tokens": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["tokens"].weight
    return model


@pytest.mark.parametrize("level", [None, "O0", "O2", "O5"])
@pytest.mark.parametrize("name", ["tokens.weight", "head.weight"])
def test_one_name_of_a_tensor_that_has_two(tmp_path, name, level):
    value = torch.arange(15.0).view(5, 3) / 7
    torch.save({name: value}, tmp_path / "run.pth")
    model = tied().to(DEVICE)
    if level is not None:
        optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    export.load_weights(model, tmp_path / "run.pth")
    assert model["head"].weight is model["tokens"].weight
    assert_loaded(model, {"tokens.weight": value, "head.weight": value})


def test_files_of_safetensors_with_tied_weights(tmp_path):
    save_model = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_model
    saved = tied()
    expected = {name: value.clone() for name, value in saved.state_dict().items()}
    save_model(saved, str(tmp_path / "net.safetensors"))
    assert_loaded(export.load_weights(tied(), tmp_path / "net.safetensors"), expected)


@pytest.mark.parametrize("model", [make, lambda: nn.BatchNorm1d(4)], ids=["inside", "alone"])
def test_files_without_the_count_of_batches(tmp_path, model):
    """As torch loads them."""
    state = {name: value + 1 for name, value in model().state_dict().items() if "num_batches" not in name}
    torch.save(state, tmp_path / "run.pth")
    expected = model()
    expected.load_state_dict(state)
    assert_loaded(export.load_weights(model(), tmp_path / "run.pth"), expected.state_dict())


def test_a_buffer_of_that_name_that_is_no_batch_norms(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("num_batches_tracked", torch.tensor(3))
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "run.pth")
    with pytest.raises(export.CheckpointError, match=r"1 missing \(num_batches_tracked\)"):
        export.load_weights(model, tmp_path / "run.pth")


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_values_that_float16_does_not_have(tmp_path, level):
    weights = other_weights()
    weights["0.weight"][1, 2] = 70000.0
    weights["1.running_var"][0] = 70000.0  # of a batch norm, which O2 leaves in float32
    torch.save(weights, tmp_path / "run.pth")
    model = make().to(DEVICE)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = {name: value.clone().cpu() for name, value in model.state_dict().items()}
    names = "0.weight" if level == "O2" else "0.weight, 1.running_var"
    message = (
        f"{names.count('.')} weights have values that are infinite in torch.float16, .* \\({names}\\), and nothing"
    )
    with pytest.raises(export.CheckpointError, match=message):
        export.load_weights(model, tmp_path / "run.pth")
    assert_loaded(model, before)


def test_values_that_are_infinite_in_the_file(tmp_path):
    weights = other_weights()
    weights["0.weight"][1, 2] = float("inf")
    torch.save(weights, tmp_path / "run.pth")
    assert export.load_weights(make().half(), tmp_path / "run.pth")[0].weight[1, 2] == float("inf")


def test_a_broken_file_of_safetensors(tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    (tmp_path / "broken.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0no json!")
    with pytest.raises(export.CheckpointError, match=r"broken\.safetensors is not a complete file of safetensors"):
        export.load_weights(make(), tmp_path / "broken.safetensors")


def test_an_old_safetensors(tmp_path, monkeypatch):
    (tmp_path / "net.safetensors").touch()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    with pytest.raises(ImportError, match=r'net\.safetensors needs safetensors >= .*pip install "safetensors>='):
        export.load_weights(make(), tmp_path / "net.safetensors")


def test_no_model(tmp_path):
    with pytest.raises(TypeError, match=r"load_weights takes a model, .* got dict"):
        export.load_weights({}, tmp_path / "run.pth")
