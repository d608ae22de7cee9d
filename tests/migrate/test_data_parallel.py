# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``--data-parallel`` makes of scripts for one card: two processes train as one with both batches."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import processes
import pytest
import torch
from devices import DEVICE, START_SCRIPT
from migrate import golden

from apex_npu.__main__ import main
from apex_npu.migrate import Options, rewrite

SCRIPT = Path(__file__).parent / "parallel/script.py"
TO = "npu" if DEVICE.type == "npu" else "portable"


def run(script, out, *arguments, processes_=1):
    """What each process of a script returns, and the checkpoint."""
    command = [sys.executable, "-W", "ignore"]
    if processes_ > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes_}"]
    # Processes of their own, which the environment of another torchrun does not join.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    environment |= {"PYTHONPATH": processes.PYTHONPATH, "OMP_NUM_THREADS": "1"}
    out.parent.mkdir(exist_ok=True)
    done = subprocess.run(
        [*command, *START_SCRIPT, str(script), str(out), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=processes.HANG_TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in out.parent.glob(f"{out.name}.*.json")]
    assert len(results) == processes_
    assert {one["type"] for one in results} == {DEVICE.type}
    return results, torch.load(f"{out}.pt")


def converted(folder, **options):
    folder.mkdir(exist_ok=True)
    made = rewrite(SCRIPT.read_bytes(), options=Options(to=TO, data_parallel="main", **options))
    assert {finding.status for finding in made.findings} <= {"changed", "note"}
    (folder / "script.py").write_bytes(made.source)
    return folder / "script.py"


def close(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(torch.tensor(one[name]), torch.tensor(other[name]), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"), [({"ignore": ("O",)}, 1e-5), ({"amp": "O2", "amp_args": "loss_scale=128.0"}, 5e-3)]
)
def test_two_processes_train_as_one_with_both_batches(tmp_path, options, tolerance):
    script = converted(tmp_path, **options)
    assert ("combine_ddp" in script.read_text()) == ("amp" in options)
    moved = tmp_path / "one_card.py"
    moved.write_bytes(rewrite(SCRIPT.read_bytes(), options=Options(to=TO, ignore=("O",))).source)
    (plain,), _ = run(moved, tmp_path / "plain/r", "8", "-")
    (alone,), _ = run(script, tmp_path / "alone/r", "8", "-")
    both, saved = run(script, tmp_path / "both/r", "4", "-", processes_=2)
    assert plain["weights"].keys() == saved["model"].keys()  # no "module." of DistributedDataParallel's
    for one in (alone, *both):
        close(one["weights"], plain["weights"], tolerance)
    assert both[0]["weights"] == both[1]["weights"]
    # Each process had one half of every batch.
    for epoch in range(2):
        for batch, halves in zip(
            plain["orders"][epoch], zip(*(one["orders"][epoch] for one in both), strict=True), strict=True
        ):
            assert sorted(batch) == sorted(chain(*halves))


@pytest.mark.slow
def test_shuffled_parts_are_disjoint_and_others_in_each_epoch(tmp_path):
    script = converted(tmp_path, ignore=("O",))
    both, _ = run(script, tmp_path / "both/r", "4", "shuffle", processes_=2)
    first, second = ([[*chain(*one["orders"][epoch])] for one in both] for epoch in range(2))
    for parts in (first, second):
        assert len(set(parts[0]) | set(parts[1])) == 32
        assert not set(parts[0]) & set(parts[1])
    assert first != second
    (alone,), _ = run(script, tmp_path / "alone/r", "8", "shuffle")
    assert alone["orders"][0] != alone["orders"][1]


MAIN = """
import torch
from torch.utils.data import DataLoader
from helper import keep

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(points, batch_size=4)
for epoch in range(3):
    for x in loader:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    keep(model)
"""
HELPER = """
import torch

def keep(model):
    torch.save(model.state_dict(), "last.pt")
"""


def planned(folder, **files):
    return golden.planned(folder, files, Options(ignore=("O",)), data_parallel=folder / "main.py")


def test_saves_of_imported_files_are_guarded(tmp_path):
    changed, _ = planned(tmp_path, main=MAIN, helper=HELPER, other=HELPER)
    assert sorted(changed) == ["helper.py", "main.py"]
    assert "get_rank() == 0:\n        torch.save(" in changed["helper.py"]


@pytest.mark.parametrize(
    ("main", "helper", "reason"),
    [
        (MAIN, HELPER.replace("torch.save(", "x = torch.save("), "part of another statement"),
        (MAIN.replace("keep(model)", "model.fc"), HELPER, "model.fc is used"),
    ],
)
def test_a_script_is_converted_whole_or_not_at_all(tmp_path, main, helper, reason):
    changed, findings = planned(tmp_path, main=main, helper=helper)
    assert changed == {}
    assert any(reason in finding.message for finding in findings if finding.status == "refused")


ENGINE = """
def train_one_epoch(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""
CALLS = """
import torch
from helper import train_one_epoch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(points, batch_size=4)
for epoch in range(3):
    train_one_epoch(model, loader, optimizer)
"""


def test_a_backward_in_another_file_is_refused(tmp_path):
    changed, findings = planned(tmp_path, main=CALLS, helper=ENGINE)
    assert changed == {}
    assert [(one.line, one.rule) for one in findings if one.status == "refused" and "main.py" in one.path] == [
        (7, "P602")
    ]
    changed, findings = planned(tmp_path, main=MAIN, helper=HELPER + ENGINE)
    assert changed == {}
    assert "P602" in [one.rule for one in findings if one.status == "refused" and "helper.py" in one.path]


STATES = """
import torch

class Keeper:
    def __init__(self, model, optimizer):
        self.inner = model
        self.optimizer = optimizer

    def states(self):
        return self.inner.state_dict(), self.optimizer.state_dict()

def keep(model, optimizer=None):
    if optimizer is not None:
        torch.save(optimizer.state_dict(), "optimizer.pt")
    torch.save({"model": model}, "whole.pt")
    return model.state_dict()
"""


def test_states_in_other_files_are_of_the_model_inside(tmp_path, monkeypatch):
    changed, findings = planned(tmp_path, main=MAIN, helper=STATES)
    assert not [one for one in findings if one.status == "refused"]
    saved, made = [], {}
    monkeypatch.setattr(torch, "save", lambda content, path: saved.append(content))
    exec(changed["helper.py"], made)
    inside = torch.nn.Sequential(torch.nn.Linear(2, 1))

    class Wrapper(torch.nn.parallel.DistributedDataParallel):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.module = inside

    names = ["0.weight", "0.bias"]
    for model in (inside, Wrapper()):
        assert list(made["keep"](model)) == names
        assert saved.pop()["model"] is inside
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        assert list(made["Keeper"](model, optimizer).states()[0]) == names
    # A module that is called so by another class is a part of it.
    other = torch.nn.Module()
    other.module = inside
    assert list(made["keep"](other)) == ["module.0.weight", "module.0.bias"]


@pytest.mark.parametrize(("text", "rule"), [("import helper\nhelper.run(\n", "F901"), ("helper.run()\n", "P601")])
def test_the_script_that_is_asked_for_is_always_looked_at(tmp_path, text, rule):
    changed, findings = planned(tmp_path, main=text, helper=HELPER)
    assert changed == {}
    (left,) = [one for one in findings if "main.py" in one.path]
    assert (left.rule, left.status) == (rule, "refused")


def test_a_second_run_changes_nothing(tmp_path):
    changed, _ = planned(tmp_path, main=MAIN, helper=HELPER)
    again, findings = planned(tmp_path, **{name.removesuffix(".py"): text for name, text in changed.items()})
    assert "helper.py" not in again
    assert [finding.status for finding in findings if finding.rule == "P601"] == ["note"]


def test_the_command(tmp_path, capsys):
    (tmp_path / "main.py").write_text(MAIN.replace("from helper import keep\n", "").replace("    keep(model)\n", ""))
    assert main(["migrate", "--data-parallel", str(tmp_path / "main.py"), "--model", "model"]) == 0
    assert "P602 changed" in capsys.readouterr().out
    for arguments, words in (
        (["--data-parallel", str(tmp_path / "nosuch.py"), str(tmp_path)], "not one of the given Python files"),
        (["--model", "model", str(tmp_path)], "needs --data-parallel"),
        (["--data-parallel", str(tmp_path / "main.py"), "--model", "net"], "gets net.parameters()"),
    ):
        assert main(["migrate", *arguments]) in (1, 2)
        printed = capsys.readouterr()
        assert words in printed.out + printed.err
