# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Converted checkpoints are loaded by torch's own classes, which go on as if nothing had been converted."""

import argparse
import copy
import os
import stat
from fractions import Fraction

import pytest
import torch

from apex_npu import optimizers
from apex_npu.__main__ import main
from apex_npu.export import files
from apex_npu.export.contents import parts_of
from apex_npu.export.conversion import convert

OPTIONS = {"lr": 0.1, "weight_decay": 0.01}


def params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 2), (5,))]


def train(optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    held = [param for group in optimizer.param_groups for param in group["params"]]
    for step in steps:
        for param in held:
            param.grad = torch.cos(param.detach() * (step + 1))
        optimizer.step()
    return [param.detach().clone() for param in held]


def as_nvidia(state: dict) -> dict:
    """As NVIDIA's FusedAdam saves it: one count for each group, none in the states."""
    state = copy.deepcopy(state)
    for group in state["param_groups"]:
        group["step"] = int(state["state"][group["params"][0]]["step"])
    for entry in state["state"].values():
        del entry["step"]
    return state


def test_nvidias_state_goes_on_in_torch():
    whole = torch.optim.AdamW(params(), **OPTIONS)
    expected = train(whole, range(6))
    first = torch.optim.AdamW(params(), **OPTIONS)
    weights = train(first, range(3))
    checkpoint = {"optimizer": as_nvidia(first.state_dict())}

    converted, changes = convert(checkpoint, "torch")
    second = torch.optim.AdamW([torch.nn.Parameter(weight) for weight in weights], **OPTIONS)
    second.load_state_dict(converted["optimizer"])
    assert all(map(torch.equal, train(second, range(3, 6)), expected))
    assert changes == ["checkpoint['optimizer']: copied the steps of the groups to the states"]
    assert "step" not in checkpoint["optimizer"]["state"][0]  # the one that was given is as it was


def test_torchs_state_goes_on_in_nvidias_class():
    expected = train(torch.optim.AdamW(params(), **OPTIONS), range(6))
    first = torch.optim.AdamW(params(), **OPTIONS)
    weights = train(first, range(3))
    converted, _ = convert(first.state_dict(), "apex")
    assert converted["param_groups"][0]["step"] == 3
    second = optimizers.FusedAdam([torch.nn.Parameter(weight) for weight in weights], **OPTIONS)
    second.load_state_dict(converted)
    for actual, wanted in zip(train(second, range(3, 6)), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-7)


def test_unequal_steps_have_no_form_in_nvidias():
    optimizer = torch.optim.Adam(params())
    train(optimizer, range(2))
    optimizer.state_dict()["state"][1]["step"].fill_(5.0)
    with pytest.raises(ValueError, match=r"group 0 .*2 to 5 steps"):
        convert({"optimizer": optimizer.state_dict()}, "apex")


def test_a_step_that_torch_leaves_in_a_group_is_renewed_for_nvidia():
    first = torch.optim.AdamW(params(), **OPTIONS)
    train(first, range(3))
    converted, _ = convert(as_nvidia(first.state_dict()), "torch")
    second = torch.optim.AdamW(params(), **OPTIONS)
    second.load_state_dict(converted)
    train(second, range(3, 6))
    left = second.state_dict()
    assert left["param_groups"][0]["step"] == 3
    back, changes = convert(left, "apex")
    assert back["param_groups"][0]["step"] == 6
    assert changes == ["checkpoint: copied the steps of the states to the groups"]
    assert left["param_groups"][0]["step"] == 3  # the one that was given is as it was
    assert convert(back, "apex") == (back, [])
    left["state"][1]["step"].fill_(5.0)
    with pytest.raises(ValueError, match=r"group 0 .*5 to 6 steps"):
        convert(left, "apex")


def test_a_step_that_a_group_begins_with_counts():
    optimizer = optimizers.FusedMixedPrecisionLamb(params(), step=4)
    train(optimizer, range(2))
    state = optimizer.state_dict()
    assert convert(state, "apex") == (state, [])
    state["param_groups"][0]["step"] = torch.tensor([5], dtype=torch.int32)
    renewed = convert(state, "apex")[0]["param_groups"][0]["step"]
    assert (renewed.item(), renewed.dtype, renewed.shape) == (6, torch.int32, (1,))


def test_masters_are_taken_out_for_torch():
    held = [torch.nn.Parameter(param.detach().bfloat16()) for param in params()]
    optimizer = optimizers.FusedAdam(held, master_weights=True)
    train(optimizer, range(2))
    converted, changes = convert({"optim": optimizer.state_dict()}, "torch")
    assert all("master_param" not in entry for entry in converted["optim"]["state"].values())
    assert any("removed float32 masters" in change for change in changes)
    torch.optim.AdamW(held).load_state_dict(converted["optim"])


def test_loss_scales_both_ways():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # makes the scale
    converted, _ = convert({"scaler": scaler.state_dict()}, "apex")
    assert converted == {"scaler": {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 0}}}

    apex = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}, "loss_scaler1": {"loss_scale": 64.0, "unskipped": 3}}
    back, changes = convert(apex, "torch")
    loaded = torch.amp.GradScaler("cpu")
    loaded.load_state_dict(back)
    assert loaded.get_scale() == 64.0
    assert loaded.state_dict()["_growth_tracker"] == 3
    assert loaded.state_dict().keys() == back.keys()
    assert any("the smallest of 2 loss scales" in change for change in changes)


def test_prefix_of_data_parallel_models():
    model = torch.nn.Linear(2, 3)
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    converted, _ = convert({"state_dict": state, "epoch": 3}, "torch", strip_module=True)
    torch.nn.Linear(2, 3).load_state_dict(converted["state_dict"])
    assert converted["epoch"] == 3
    assert convert({"state_dict": state}, "torch")[0]["state_dict"] is state


def test_a_prefix_that_is_not_there_is_said():
    state = torch.nn.Linear(2, 3).state_dict()
    some = {"module.weight": state["weight"], "bias": state["bias"]}
    for weights in (state, some):
        converted, changes = convert({"model": weights}, "torch", strip_module=True)
        assert converted == {"model": weights}
        assert changes == ["checkpoint['model']: no prefix removed: not all names begin with module. or _orig_mod."]
    scaler = torch.amp.GradScaler("cpu").state_dict()
    _, changes = convert({"scaler": scaler}, "apex", strip_module=True)
    assert changes[0] == "no prefix removed: there are no weights of a model"


def test_what_a_loss_scale_does_not_keep_is_said():
    amp_state = {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 7}}
    _, changes = convert({"amp": amp_state}, "torch")
    assert changes == [
        "checkpoint['amp']: loss scale 128 becomes that of a torch.amp.GradScaler, which is dynamic, with "
        "growth_interval 2000: amp's state does not say whether the scale was static"
    ]
    usual = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 1}
    assert convert({"scaler": usual}, "apex")[1] == ["checkpoint['scaler']: loss scale 8 becomes amp's, for one loss"]
    other = usual | {"growth_factor": 1.5, "growth_interval": 100}
    _, changes = convert({"scaler": other}, "apex")
    assert changes[1].startswith("checkpoint['scaler']: left out growth_factor=1.5, growth_interval=100, ")
    assert len(changes) == 2


def test_nothing_to_convert():
    with pytest.raises(ValueError, match=r"no state .*dict"):
        convert({"epoch": 3}, "torch")
    with pytest.raises(ValueError, match="to='onnx'"):
        convert({}, "onnx")


def test_lists_of_optimizers():
    states = [torch.optim.SGD(params(), lr=0.1).state_dict(), torch.optim.SGD(params(), lr=0.2).state_dict()]
    assert [part.name for part in parts_of({"optimizers": states})] == [
        "checkpoint['optimizers'][0]",
        "checkpoint['optimizers'][1]",
    ]
    converted, _ = convert({"optimizers": states}, "torch")
    assert [state["param_groups"][0]["lr"] for state in converted["optimizers"]] == [0.1, 0.2]


def test_a_metric_that_is_a_tensor_makes_no_model_of_a_checkpoint():
    model = torch.nn.BatchNorm1d(2)
    scales = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}
    best = {"epoch": 3, "best_acc1": torch.tensor(0.5), "state_dict": model.state_dict(), "amp": scales}
    assert [(part.name, part.kind) for part in parts_of(best)] == [
        ("checkpoint['epoch']", "other"),
        ("checkpoint['best_acc1']", "other"),
        ("checkpoint['state_dict']", "model"),
        ("checkpoint['amp']", "amp"),
    ]
    assert convert(best, "torch")[0]["amp"]["scale"] == 8.0
    extra = {**model.state_dict(), "_extra_state": {"calls": 3}}
    kinds = [part.kind for part in parts_of({"models": [extra, extra], "acc": torch.tensor(0.5)})]
    assert kinds == ["model", "model", "other"]


@pytest.fixture
def checkpoint(tmp_path):
    optimizer = torch.optim.AdamW(params(), **OPTIONS)
    train(optimizer, range(3))
    path = tmp_path / "apex.pth.tar"
    amp = {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 2}}
    model = torch.nn.Linear(2, 3).state_dict()
    torch.save({"epoch": 4, "model": model, "optimizer": as_nvidia(optimizer.state_dict()), "amp": amp}, path)
    return path


def test_the_command_shows_what_is_inside(checkpoint, capsys):
    assert main(["convert", str(checkpoint)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "checkpoint['epoch']: 4",
        "checkpoint['model']: model: 2 tensors, 9 elements (2 float32)",
        "checkpoint['optimizer']: optimizer: Adam, AdamW or LAMB (exp_avg, exp_avg_sq), 2 of 2 parameters have state, "
        "1 groups; its step is in its groups, as NVIDIA's optimizers count",
        "checkpoint['amp']: amp: loss scale 128",
    ]


def test_the_command_converts(checkpoint, tmp_path, capsys):
    out = tmp_path / "torch.pt"
    command = ["convert", str(checkpoint), "--to", "torch", "--out", str(out)]
    assert main(command) == 0
    assert "loss scale 128 becomes that of a torch.amp.GradScaler" in capsys.readouterr().out
    state = torch.load(out)
    torch.optim.AdamW(params()).load_state_dict(state["optimizer"])
    torch.amp.GradScaler("cpu").load_state_dict(state["amp"])
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE(checkpoint.stat().st_mode)
    assert main(command) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0


class Spy:
    """Pickled by name: restoring it would execute code of the file's choice."""

    def __reduce__(self):
        return (os.mkdir, ("executed",))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: None, "there is no such file"),
        (lambda path: path.mkdir(), "is a folder; name a file in it"),
        (lambda path: path.write_bytes(b""), "not a complete checkpoint"),
        (lambda path: path.write_text("no checkpoint"), "not a complete checkpoint"),
        (lambda path: path.write_bytes(b"PK\x03\x04 a zip that ends"), "not a complete checkpoint"),
        (lambda path: torch.save({"optimizer": Spy()}, path), "mkdir"),
        (
            lambda path: torch.save({"args": argparse.Namespace(lr=1), "top": Fraction(1, 3)}, path),
            "(fractions.Fraction)",
        ),
        (lambda path: torch.save({"epoch": 3}, path), "there is no state of a model"),
        (lambda path: torch.save([1, 2], path), "in this list"),
        (lambda path: torch.save(torch.ones(3), path), "in this Tensor"),
    ],
    ids=["missing", "folder", "empty", "text", "truncated", "code", "object", "numbers", "list", "tensor"],
)
def test_bad_files_are_refused_and_nothing_is_written(tmp_path, capsys, monkeypatch, write, words):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.pt"
    write(path)
    assert main(["convert", str(path), "--to", "torch", "--out", str(tmp_path / "new.pt")]) == 2
    error = capsys.readouterr().err
    assert " convert: error: " in error
    assert error.count("\n") == 1
    assert words in error
    assert not (tmp_path / "new.pt").exists()
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "torch"], "--to and --out need each other"),
        (["--strip-module"], "--strip-module needs --to"),
        (["--to", "torch", "--out", "no/such/folder/new.pt"], "name a file in a folder that can be written to"),
        (["--to", "onnx", "--out", "new.pt"], "'onnx' is not one of apex, torch"),
        (
            ["--to", "torch", "--out", "new.safetensors"],
            "new.safetensors: this is a file of torch.save; name it new.pt",
        ),
        (["--to", "torch", "--out", ".", "--force"], ". is a folder; name a file in it"),
        (["--to", "torch", "--out", "."], ". is a folder; name a file in it"),
    ],
    ids=" ".join,
)
def test_bad_options(checkpoint, tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["convert", str(checkpoint), *options])
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert words in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == [checkpoint.name]


def test_a_link_stays(tmp_path):
    (tmp_path / "new.pt").symlink_to("store.pt")
    files.write({"epoch": 2}, tmp_path / "new.pt")
    assert (tmp_path / "new.pt").is_symlink()
    assert torch.load(tmp_path / "store.pt") == {"epoch": 2}


def read_of(value, tmp_path, **options):
    torch.save(value, tmp_path / "run.pt", **options)
    return files.read(tmp_path / "run.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_what_training_scripts_save_beside_tensors(tmp_path, zipped):
    numpy = pytest.importorskip("numpy")
    codes = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", ">f8", ">i2"]
    best = {code: numpy.dtype(code).type(1.25) for code in codes}
    checkpoint = {"args": argparse.Namespace(lr=0.1, layers=[2, 3]), "best": best}
    before = torch.serialization.get_safe_globals()
    found = read_of(checkpoint, tmp_path, _use_new_zipfile_serialization=zipped)
    assert found["args"] == checkpoint["args"]
    assert found["best"] == {code: value.item() for code, value in best.items()}
    assert {type(value) for value in found["best"].values()} == {bool, int, float}
    assert set(torch.serialization.get_safe_globals()) == set(before)


@pytest.mark.parametrize("value", [complex(1), "text", b"bytes"], ids=repr)
def test_other_scalars_of_numpy_are_refused(tmp_path, value):
    numpy = pytest.importorskip("numpy")
    with pytest.raises(files.CheckpointError, match=r"contains objects .*multiarray\.scalar"):
        read_of(numpy.array(value)[()], tmp_path)


def test_a_namespace_calls_nothing_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(files.CheckpointError, match="mkdir"):
        read_of(argparse.Namespace(__setstate__=Spy()), tmp_path)
    assert not (tmp_path / "executed").exists()


def test_what_the_caller_allows_is_read(tmp_path):
    value = {"args": argparse.Namespace(rate=Fraction(1, 3))}
    with pytest.raises(files.CheckpointError, match="safe_globals"):
        read_of(value, tmp_path)
    allowed = [Fraction, argparse.Namespace]
    with torch.serialization.safe_globals(allowed):
        assert read_of(value, tmp_path) == value
        assert set(allowed) <= set(torch.serialization.get_safe_globals())


def test_an_array_of_numpy_is_read_where_the_caller_allows_its_parts(tmp_path):
    numpy = pytest.importorskip("numpy")
    array = numpy.array([1.5, 2.5])
    allowed = [array.__reduce__()[0], numpy.ndarray, numpy.dtype, type(array.dtype)]
    with torch.serialization.safe_globals(allowed):
        assert (read_of(array, tmp_path) == array).all()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    files.write({"epoch": 1}, path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write({"epoch": 2}, path)
    monkeypatch.undo()
    assert files.read(path) == {"epoch": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.pt"]
