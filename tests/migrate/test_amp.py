# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Programs without amp, or with torch.amp, run with the amp that the rules put in; programs of several files."""

import inspect
import json
import runpy
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from devices import DEVICE, require
from migrate import golden
from migrate.test_command import migrate

from apex_npu import amp, optimizers
from apex_npu.migrate import Options, plan, rewrite
from apex_npu.migrate.amp.check import LEVELS
from apex_npu.migrate.rules.tables import FUSED, FUSED_KEYWORDS

PROGRAMS = sorted((Path(__file__).parent / "training").glob("*.py"))
# Device rules where the device is an npu; on others programs find none, and run on the CPU.
SELECT = ("D", "X", "O") if DEVICE.type == "npu" else ("X", "O")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_trains_with_amp(program, level, tmp_path, monkeypatch):
    original = runpy.run_path(str(program))
    options = Options(select=SELECT, amp=level, amp_args="loss_scale=128.0, verbosity=0")
    rewritten = rewrite(program.read_bytes(), options=options)
    assert {finding.status for finding in rewritten.findings} == {"changed"}
    changed = tmp_path / program.name
    changed.write_bytes(rewritten.source)
    scaled = []
    scale_loss = amp.scale_loss
    monkeypatch.setattr(amp, "scale_loss", lambda loss, own: scaled.append(own) or scale_loss(loss, own))
    new = runpy.run_path(str(changed))
    assert (original["where"], new["where"]) == ("cpu", DEVICE.type if DEVICE.type == "npu" else "cpu")
    tolerance = 2e-2 if level in ("O4", "O5") else 1e-3
    assert new["losses"][0] == pytest.approx(original["losses"][0], rel=tolerance)
    assert new["losses"] == pytest.approx(original["losses"], rel=25 * tolerance)
    if program.stem != "torch_amp" or DEVICE.type == "npu":  # which is switched on there alone
        assert new["losses"] != original["losses"]
    assert scaled


_READS_AN_INPUT = """
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for p in model.parameters():
    p.requires_grad = True
for batch, y in data:
    {made}
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = sum(p.grad.norm() for p in model.parameters())
    batch = {read}
    optimizer.step()
"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("made", "read", "refused"),
    [
        ("x = batch.clone().requires_grad_()", "x + x.grad", True),
        ("x = torch.tensor(batch, requires_grad=True)", "x + x.grad.data", True),
        ("x = batch; x.requires_grad = True", "x + x.grad", True),
        ("x = batch; x.requires_grad_(True)", "x + x.grad", True),
        ("x = batch * 1.0; x.retain_grad()", "x + x.grad", True),
        ("x = batch; x.requires_grad = True", "x", False),
        ("x = batch; model.weight.requires_grad = True", "x + model.weight.grad", False),
        ("x = batch", "x", False),
    ],
)
def test_gradients_of_inputs_are_refused_where_there_is_a_loss_scale(level, made, read, refused):
    rewritten = rewrite(_READS_AN_INPUT.format(made=made, read=read), options=Options(select=SELECT, amp=level))
    why = [one.message for one in rewritten.findings if one.status == "refused"]
    assert why == (
        ["amp leaves gradients of inputs multiplied by the loss scale"] if refused and level in ("O1", "O2") else []
    )


def test_a_moved_switch_switches_amp_off(tmp_path):
    program = next(path for path in PROGRAMS if path.stem == "torch_amp")
    source = program.read_text(encoding="utf-8").replace("use_amp = torch.cuda.is_available()", "use_amp = False")
    original = runpy.run_path(str(program))
    changed = tmp_path / program.name
    changed.write_text(rewrite(source, options=Options(select=SELECT, ignore=("O",), amp="O2")).source)
    assert runpy.run_path(str(changed))["losses"] == pytest.approx(original["losses"], rel=1e-5)


MAIN = """
import torch
from engine import fit

def main(model, data):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(model, data, optimizer)
"""
ENGINE = """
import torch

def fit(model, data, optimizer):
    for x in data:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""
OTHER = """
import torch
import engine

def other(model):
    optimizer = torch.optim.Adam(model.parameters())
    engine.fit(model, [], optimizer)
"""
FACTORY = """
import torch

def make(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return optimizer
"""
ENGINE_OF_FACTORY = ENGINE.replace("for x", "optimizer = main.make(model)\n    for x").replace(
    "import torch", "import torch, main"
)
OWN_ENGINE = ENGINE_OF_FACTORY.replace("model, data, optimizer", "model, data")
SCRIPT = """
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = model(x).sum()
loss.backward()
optimizer.step()
"""
SHARDED = "from torch.distributed.fsdp import fully_shard\ndef fit(model, *rest):\n    fully_shard(model)\n"


def planned(folder, level="O1", **files):
    """What becomes of files: their new text where they change, and the reasons of refusals."""
    changed, findings = golden.planned(folder, files, Options(select=("X",), amp=level))
    return changed, {finding.message for finding in findings if finding.status == "refused"}


def test_a_program_of_two_files(tmp_path):
    changed, refused = planned(tmp_path, main=MAIN, engine=ENGINE)
    assert not refused
    assert 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")' in changed["main.py"]
    assert "with amp.scale_loss(loss, optimizer) as scaled_loss:" in changed["engine.py"]


@pytest.mark.parametrize("attribute", [False, True])
def test_a_factory_in_another_file_calls_initialize(attribute, tmp_path):
    name = "self.optimizer" if attribute else "optimizer"
    engine = OWN_ENGINE.replace("fit(", "fit(self, ").replace("optimizer", name)
    changed, refused = planned(tmp_path, main=FACTORY, engine=engine)
    assert not refused
    made = "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
    line = '    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n    return optimizer\n'
    assert made + line in changed["main.py"]
    assert f"with amp.scale_loss(loss, {name}) as scaled_loss:" in changed["engine.py"]
    assert "initialize" not in changed["engine.py"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"main": MAIN, "engine": ENGINE.replace("loss.backward()", "loss.backward() or 1")}, "(A353)"),
        ({"main": MAIN.replace("model.parameters", "model.head.parameters"), "engine": ENGINE}, "(A352)"),
        ({"main": MAIN, "engine": "import library as fit"}, "no call of backward was found"),
        (
            {"main": MAIN.replace("torch.optim.SGD(model.parameters(), 0.1)", "make()"), "engine": ENGINE},
            "no optimizer",
        ),
        ({"main": MAIN + "import other", "engine": ENGINE, "other": OTHER}, "made in several files"),
        ({"main": MAIN, "engine": ENGINE.replace("import torch", "from apex_npu import amp")}, "already uses amp"),
        ({"main": FACTORY, "engine": ENGINE_OF_FACTORY}, "(A351)"),  # or the argument
        ({"main": FACTORY, "engine": OWN_ENGINE + "\nother = main.make(other)"}, "(A351)"),
        (
            {"main": FACTORY, "engine": OWN_ENGINE.replace("optimizer = m", "for _ in x: optimizer = m")},
            "(A351)",
        ),
        ({"main": FACTORY.replace("return optimizer", "return optimizer, 1"), "engine": OWN_ENGINE}, "(A351)"),
        ({"main": MAIN, "pack__engine": ENGINE}, "no call of backward was found"),
        ({"main": MAIN, "engine": ENGINE + SHARDED}, "parameters are sharded"),
        ({"main": SCRIPT + "import engine", "engine": SHARDED}, "parameters are sharded"),
        ({"main": MAIN.replace("from engine import fit", "import main as engine")}, "no call of backward was found"),
    ],
)
def test_a_program_is_converted_whole_or_not_at_all(files, reason, tmp_path):
    changed, refused = planned(tmp_path, **files)
    assert changed == {}
    assert any(reason in message for message in refused)


def test_what_two_programs_share_follows_both(tmp_path):
    changed, refused = planned(tmp_path, main=MAIN, other=OTHER, engine=ENGINE)
    assert not refused
    assert {*changed} == {"main.py", "other.py", "engine.py"}
    broken = OTHER.replace("model.parameters", "model.head.parameters")
    for name in ("main", "engine"):
        (tmp_path / f"{name}.py").unlink()
    changed, refused = planned(tmp_path, main=MAIN, other=broken, engine=ENGINE, script=SCRIPT)
    assert {*changed} == {"script.py"}  # in the same folder, and a program of its own


AVERAGED = """
import torch.distributed as dist

def reduce_all(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)

def average(model):
    reduce_all([p.grad for p in model.parameters()])
"""


@pytest.mark.parametrize(
    "program",
    [
        AVERAGED,
        "import horovod.torch as hvd\nfor p in model.parameters():\n    p.grad = hvd.allreduce(p.grad)\n",
        "from utils import average_gradients\naverage_gradients([p.grad for p in model.parameters()])\n",
        AVERAGED.replace("reduce_all([p", "found = {}\n    found.setdefault(0, []).append([p")
        + "    reduce_all(found[0])\n",
        AVERAGED.replace("model):", "model): return [p.grad for p in model.parameters()]\ndef g(model):").replace(
            "reduce_all([p.grad for p in model.parameters()]", "reduce_all(average(model)"
        ),
    ],
)
def test_gradients_that_are_averaged_by_hand_keep_amp_out(program, tmp_path):
    changed, refused = planned(tmp_path, main=SCRIPT + "import other", other=program)
    assert changed == {}
    assert any("gradients are averaged here" in message for message in refused)


@pytest.mark.parametrize(
    "program",
    [
        AVERAGED.replace("p.grad", "p.data"),
        AVERAGED.replace("p.grad", "p.grad.norm()"),
        AVERAGED.replace("reduce_all([p.grad", "for p in (p, q): p.grad *= 2\n    reduce_all([p.data"),
        "from functools import reduce\ntotal = reduce(add, [p.grad for p in model.parameters()])\n",
    ],
)
def test_other_collectives_do_not_keep_amp_out(program, tmp_path):
    changed, refused = planned(tmp_path, main=SCRIPT + "import other", other=program)
    assert {*changed} == {"main.py"}
    assert not refused


def test_relative_imports_make_a_program(tmp_path):
    main = MAIN.replace("from engine", "from .parts.engine")
    changed, refused = planned(tmp_path, pack__main=main, pack__parts__engine=ENGINE, pack__parts____init__="")
    assert not refused
    assert {*changed} == {"pack/main.py", "pack/parts/engine.py"}


@pytest.mark.parametrize("name", FUSED)
def test_arguments_of_optimizers(name):
    if name == "Muon":
        require("torch_muon")
    ours, places = FUSED[name]
    torchs = inspect.signature(getattr(torch.optim, name)).parameters
    own = inspect.signature(getattr(optimizers, ours)).parameters
    assert [one for one in own if own[one].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD] == places.split()
    assert [*torchs][: len(places.split())] == places.split()
    assert own.keys() | get_type_hints(optimizers.FusedOptions).keys() >= FUSED_KEYWORDS & torchs.keys()
    for one in own.keys() & torchs.keys():
        assert own[one].default == torchs[one].default


def test_the_command_puts_amp_in(tmp_path, capsys):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["--amp", "O2", "--amp-args", "loss_scale=128.0, verbosity=0", "--ignore", "O", "--write", "--backup"]
    assert migrate(*arguments, tmp_path) == 0
    written = (tmp_path / "script.py").read_text()
    assert 'amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)' in written
    assert migrate(*arguments[:-2], "--check", tmp_path) == 0  # a second run changes nothing
    assert "1 notes" in capsys.readouterr().out


def test_the_command_says_why_amp_stays_out(tmp_path, capsys):
    (tmp_path / "script.py").write_text(SCRIPT.replace("model.parameters", "args.model.parameters"))
    assert migrate("--amp", "O1", "--ignore", "O", tmp_path) == 1
    assert "A352 refused  the model is args.model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--amp", "O3"], "'O3' is not one of O1, O2, O4, O5"),
        (["--amp", "O1", "--amp-args", "opt_level='O2'"], "opt_level is not allowed here"),
        (["--amp", "O1", "--amp-args", "loss_scal=128"], "loss_scal is not allowed here; allowed are"),
        (["--amp", "O1", "--amp-args", "loss_scale=scale()"], "pass keyword arguments with literal values"),
        (["--amp", "O1", "--amp-args", "128.0"], "no keyword arguments"),
        (["--amp", "O1", "--ignore", "A303"], "the rules of amp apply together"),
        (["--select", "T"], "the rules of amp apply together"),
        (["--amp-args", "verbosity=0"], "--amp-args needs --amp"),
    ],
)
def test_wrong_usage(arguments, message, tmp_path, capsys):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert migrate(*arguments, tmp_path) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "script.py").read_text() == SCRIPT


def test_a_notebook_gets_amp(tmp_path):
    cells = [{"cell_type": "code", "source": [line + "\n" for line in SCRIPT.strip().splitlines()]}]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    (change,) = plan([tmp_path], Options(select=("X",), amp="O1")).files
    program = "".join(json.loads(change.after)["cells"][0]["source"])
    assert program == rewrite(SCRIPT.strip() + "\n", options=Options(select=("X",), amp="O1")).source
    assert "scaled_loss.backward()" in program
