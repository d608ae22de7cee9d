# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``run --device npu``: modules are rewritten as they are imported, and no file changes."""

import atexit
import importlib
import inspect
import json
import linecache
import py_compile
import sys
import traceback
import types
import zipfile

import pytest
import torch
from devices import DEVICE
from migrate.started import start

from apex_npu import compat
from apex_npu.__main__ import main
from apex_npu.migrate import rewriting
from apex_npu.migrate.run import running
from apex_npu.migrate.run.running import Rewriter, Run, npu_arguments

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
    for folder, module in (("ours", "rewritten_module"), ("theirs", "other_module")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{module}.py").write_text(MODULE)
        monkeypatch.syspath_prepend(tmp_path / folder)
    rewriter = Rewriter(tmp_path / "ours")
    monkeypatch.setattr(sys, "meta_path", [rewriter, *sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield rewriter
    for name in ("rewritten_module", "other_module"):
        sys.modules.pop(name, None)


def test_torch_of_another_module_is_followed(rewriter, tmp_path):
    (tmp_path / "ours/passes_torch_on.py").write_text("import torch\n")
    path = str(tmp_path / "ours/main.py")
    program = b'from passes_torch_on import *\ndevice = "cuda" if torch.cuda.is_available() else "cpu"\n'
    rewriter.compile(program, path)
    assert linecache.getline(path, 2) == 'device = "npu" if torch.npu.is_available() else "cpu"\n'


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


@pytest.mark.parametrize(
    ("also", "rewritten"), [("other_module", True), ("other", False), ("other_module.part", False)]
)
def test_a_package_elsewhere_is_rewritten_by_its_name(rewriter, also, rewritten):
    rewriter.settings = Run("", also=(also,))
    assert hasattr(importlib.import_module("other_module").Moved(), "npu") is rewritten


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_what_compiles_functions_sees_the_new_text(rewriter, tmp_path):
    text = 'import torch\n\n\ndef where(x: torch.Tensor) -> str:\n    return str("cuda:1")\n'
    (tmp_path / "ours/rewritten_module.py").write_text(text)
    module = importlib.import_module("rewritten_module")
    assert torch.jit.script(module.where)(torch.ones(1)) == module.where(torch.ones(1)) == "npu:1"


@pytest.mark.parametrize("unsure", [True, False])
def test_what_is_unsure_is_applied_unless_it_is_to_be_left(unsure, tmp_path, capsys):
    rewriter = Rewriter(tmp_path, Run("", unsure=unsure))
    names = {"pick": str}
    exec(rewriter.compile(b'picked = pick("cuda")', "t.py"), names)
    assert names["picked"] == ("npu" if unsure else "cuda")
    rewriter.tell()
    assert ("t.py:1:15  D106 unsure" in capsys.readouterr().err) is not unsure


@pytest.mark.parametrize("force", [True, False])
def test_a_file_that_speaks_of_npu_is_left_unless_forced(force, tmp_path):
    rewriter = Rewriter(tmp_path, Run("", force=force))
    names = {}
    exec(rewriter.compile(b'device = "cuda"\nother_device = "npu"', "t.py"), names)
    assert names["device"] == ("npu" if force else "cuda")
    assert any(finding.rule == "D159" for finding in rewriter.findings) is not force


def test_all_findings_are_written_at_the_end(tmp_path, capsys):
    rewriter = Rewriter(tmp_path, Run("", changes=str(tmp_path / "changes.json")))
    for _ in range(2):  # a file that is read twice is reported once
        rewriter.compile(b"import torch\ntorch.cuda.synchronize()\nmodel = torch.nn.DataParallel(model)\n", "t.py")
    rewriter.tell()
    written = json.loads((tmp_path / "changes.json").read_text())
    assert [(one["rule"], one["status"], one["after"]) for one in written] == [
        ("D101", "changed", "torch.npu.synchronize"),
        ("D150", "refused", None),
    ]
    assert "1 places in 1 files" in capsys.readouterr().err


def test_an_expression_that_is_too_deep_for_the_rules_runs_as_it_is(tmp_path, monkeypatch):
    def too_deep(*arguments):
        raise RecursionError

    monkeypatch.setattr(rewriting, "Program", too_deep)
    rewriter = Rewriter(tmp_path)
    names = {}
    exec(rewriter.compile(b'device = "cuda"', "t.py"), names)
    assert names["device"] == "cuda"
    assert [finding.rule for finding in rewriter.findings] == ["F901"]


@pytest.fixture
def at_exit(monkeypatch):
    """What is to be called at exit; nothing of torch_npu's is needed."""
    called = []
    monkeypatch.setattr(atexit, "register", called.append)
    monkeypatch.setattr(atexit, "unregister", called.remove)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv(running.SPAWNED, "")
    return called


@pytest.mark.parametrize("reason", ["Torch not compiled with CUDA enabled", "no such file"])
def test_what_was_left_comes_before_the_traceback_of_a_script_that_misses_cuda(reason, at_exit, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(f"import torch\nif 0: torch.cuda.nvtx.mark('')\nraise AssertionError({reason!r})")
    with pytest.raises(AssertionError, match=reason):
        running.start(Run(str(script)), {})
    told = "torch.cuda.nvtx has no counterpart" in capsys.readouterr().err
    assert told is ("CUDA" in reason)
    assert bool(at_exit) is not told


def test_processes_that_are_spawned_have_the_same_settings(at_exit, tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    settings = Run(str(script), also=("a", "b.c"), unsure=False, force=True, changes=str(tmp_path / "c.csv"))
    running.start(settings, {})
    given = []
    monkeypatch.setattr(running, "start", lambda settings, names, tells: given.append((settings, tells)))
    running.start_spawned({})
    assert given == [(settings, False)]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--also", "nosuchpackage"], "--also nosuchpackage: there is no package of this name"),
        (["--also", "nosuch.package"], "--also nosuch.package: there is no package of this name"),
        (["--also", "torch"], "--also torch: it was imported before"),
        (["--changes", "a.txt"], "a.txt has no known format"),
        (["--changes", "nosuchfolder/a.csv"], "there is no folder"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused_before_the_script_runs(
    words, reason, at_exit, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError")
    assert main(["run", "--device", "npu", *words, str(script)]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--also", "a"], ["--changes", "a.csv"], ["--force-files"], ["--no-unsure"]])
def test_settings_of_the_rules_go_with_a_device(words, tmp_path, capsys):
    (tmp_path / "a.py").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["run", *words, str(tmp_path / "a.py")])
    assert "need --device npu" in capsys.readouterr().err


def test_a_module_that_does_not_parse_fails_as_ever(rewriter, tmp_path):
    (tmp_path / "ours/rewritten_module.py").write_text("cuda = (")
    with pytest.raises(SyntaxError):
        importlib.import_module("rewritten_module")
    assert [finding.rule for finding in rewriter.findings] == ["F901"]


ROUNDS = """
from apex import amp
if False:
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    for p in model.parameters():
        p.data.mul_(0.9)
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Return what the command prints to stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def printed(*words):
        assert main(["run", *words]) == 0
        return capsys.readouterr().err

    yield printed
    compat.uninstall_apex()


@pytest.mark.parametrize("way", [["rounds_weights.py"], ["-m", "rounds_weights"]])
def test_arithmetic_on_16_bit_weights_is_reported_by_the_first_process(way, run, tmp_path, monkeypatch):
    (tmp_path / "rounds_weights.py").write_text(ROUNDS)
    for rank, reports in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert ("rounds_weights.py:6:9  X251 refused" in run(*way)) is reports
    monkeypatch.delenv("RANK")
    assert "X251" in run(*way)


def test_a_program_without_source_is_not_reported(run, tmp_path):
    (tmp_path / "a.py").write_text(ROUNDS)
    py_compile.compile(str(tmp_path / "a.py"), str(tmp_path / "b.pyc"))
    with zipfile.ZipFile(tmp_path / "c.pyz", "w") as file:
        file.writestr("__main__.py", ROUNDS)
    assert run("b.pyc") == ""
    assert run("c.pyz") == ""


def test_a_package_is_reported_and_not_imported_twice(run, tmp_path):
    for name in ("pk_of_rounds", "pk_of_rounds/inner", "pk_that_fails"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "pk_of_rounds/inner/__main__.py").write_text(ROUNDS)
    assert "inner/__main__.py:6:9  X251 refused" in run("-m", "pk_of_rounds.inner")
    (tmp_path / "pk_that_fails/__init__.py").write_text("open('log', 'a').write('once')\nimport pk_that_is_missing")
    (tmp_path / "pk_that_fails/train.py").write_text(ROUNDS)
    with pytest.raises(ImportError, match="pk_that_is_missing"):
        run("-m", "pk_that_fails.train")
    assert (tmp_path / "log").read_text() == "once"


def test_arithmetic_on_16_bit_weights_is_reported_on_npu_too(tmp_path):
    rewriter = Rewriter(tmp_path)
    exec(rewriter.compile(ROUNDS.replace("apex", "apex_npu").encode(), "t.py"), {})
    assert [(one.rule, one.line) for one in rewriter.findings] == [("X251", 6)]


def test_arguments():
    given = ["--device", "cuda", "--device=cuda:1", "nccl", "runs/cuda", "--cuda", "cuda_1", "--no-cuda=1"]
    assert npu_arguments(given) == [
        *["--device", "npu", "--device=npu:1", "hccl", "runs/cuda", "--cuda", "cuda_1", "--no-cuda=1"]
    ]


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
    queue = torch.multiprocessing.get_context("spawn").Queue()
    helper.train(0, queue)
    print(queue.get(timeout=60), sys.argv[1:], amp.__name__)
    if torch.cuda.is_available():
        for method, target in (("spawn", train), ("forkserver", helper.train)):
            context = torch.multiprocessing.get_context(method)
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
    done = start(tmp_path, "-m", "apex_npu", "run", "--device", "npu", *way, "--device", "cuda:0")
    printed = done.stdout.splitlines()
    assert printed[0] == "(0, 'npu:0', 'helper') ['--device', 'npu:0'] apex.amp", done.stderr
    assert sorted(printed[1:]) == ["(1, 'npu:0', 'helper')", "(1, 'npu:0', 'train')"], done.stderr
    assert done.stderr.count("the script's arguments are --device npu:0") == 1
    assert "nn.DataParallel does not run on npu" in done.stderr
    assert "places in 2 files were rewritten for npu" in done.stderr
    assert (tmp_path / "helper.py").read_text() == HELPER
