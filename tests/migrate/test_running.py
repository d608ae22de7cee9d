# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``run --device npu``: modules are rewritten as they are imported, and no file changes."""

import importlib
import inspect
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from devices import DEVICE, SIMULATOR

from apex_npu.__main__ import main
from apex_npu.migrate.running import Rewriter, npu_arguments

ROOT = Path(__file__).parents[2]
MODULE = '''"""Rewritten."""


class Moved:
    def cuda(self):
        return f"cuda:{len('a')}"


def f(x):
    return x.cuda()


def fails(x):
    x.cuda()
    raise ValueError("cuda:1")  # line 15
'''


@pytest.fixture
def rewriter(tmp_path, monkeypatch):
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours/rewritten_module.py").write_text(MODULE)
    (tmp_path / "theirs/other_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "ours")
    monkeypatch.syspath_prepend(tmp_path / "theirs")
    rewriter = Rewriter(tmp_path / "ours")
    monkeypatch.setattr(sys, "meta_path", [rewriter, *sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield rewriter
    for name in ("rewritten_module", "other_module"):
        sys.modules.pop(name, None)


def test_a_module_below_the_folder(rewriter, tmp_path):
    module = importlib.import_module("rewritten_module")
    moved = module.Moved()
    assert module.f(moved) == moved.npu() == moved.cuda() == "npu:1"
    assert inspect.getsource(module.f) == "def f(x):\n    return x.npu()\n"
    with pytest.raises(ValueError, match="npu:1") as raised:
        module.fails(moved)
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (last.lineno, last.line) == (15, 'raise ValueError("npu:1")  # line 15')
    assert [path.name for path in (tmp_path / "ours").rglob("*")] == ["rewritten_module.py"]
    assert (tmp_path / "ours/rewritten_module.py").read_text() == MODULE


def test_a_module_elsewhere_stays(rewriter):
    module = importlib.import_module("other_module")
    assert not hasattr(module.Moved(), "npu")
    assert rewriter.findings == []


def test_a_module_that_does_not_parse_fails_as_ever(rewriter, tmp_path):
    (tmp_path / "ours/rewritten_module.py").write_text("cuda = (")
    with pytest.raises(SyntaxError):
        importlib.import_module("rewritten_module")
    assert [finding.rule for finding in rewriter.findings] == ["F901"]


def test_arguments():
    given = ["--device", "cuda", "--device=cuda:1", "nccl", "runs/cuda", "--cuda", "cuda_1", "--no-cuda=1"]
    assert npu_arguments(given) == [
        *["--device", "npu", "--device=npu:1", "hccl", "runs/cuda", "--cuda", "cuda_1", "--no-cuda=1"]
    ]


def test_another_device_is_refused(tmp_path, capsys):
    (tmp_path / "a.py").touch()
    assert main(["run", "--device", "xpu", str(tmp_path / "a.py")]) == 2
    assert "--device xpu" in capsys.readouterr().err


HELPER = """
import torch

def train(rank, queue):
    x = torch.ones(2).cuda()
    queue.put((rank, str(x.device), __name__))
"""
PROGRAM = """
import sys
import torch
from apex import amp
import helper

def train(rank, queue):
    torch.cuda.set_device(0)
    queue.put((rank, f"cuda:{torch.cuda.current_device()}", helper.train.__name__))

if __name__ == "__main__":
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    helper.train(0, queue)
    print(queue.get(timeout=60), sys.argv[1:], amp.__name__)
    if torch.cuda.is_available():
        for target in (train, helper.train):
            process = context.Process(target=target, args=(1, queue))
            process.start()
            print(queue.get(timeout=60))
            process.join()
    model = torch.nn.DataParallel if False else torch.nn.DataParallel(torch.nn.Linear(1, 1))
"""


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "npu", reason="the script runs on npu")
@pytest.mark.parametrize("way", [["program.py"], ["-m", "program"]])
def test_a_script_and_the_processes_that_it_spawns(tmp_path, way):
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "site").mkdir()
    # Spawned processes have a simulated NPU, too.
    (tmp_path / "site/sitecustomize.py").write_text(f"import {SIMULATOR.__name__} as s; s.install()")
    paths = [str(tmp_path / "site"), str(ROOT), str(ROOT / "tests/host_cann")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "apex_npu", "run", "--device", "npu", *way, "--device", "cuda:0"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    printed = done.stdout.splitlines()
    assert printed[0] == "(0, 'npu:0', 'helper') ['--device', 'npu:0'] apex.amp", done.stderr
    assert sorted(printed[1:]) == ["(1, 'npu:0', 'helper')", "(1, 'npu:0', 'train')"], done.stderr
    assert "nn.DataParallel does not run on npu" in done.stderr
    assert "places in 2 files ran as npu's" in done.stderr
    assert (tmp_path / "helper.py").read_text() == HELPER
