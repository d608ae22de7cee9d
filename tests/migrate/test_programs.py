# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Programs for CUDA: on the CPU as they are, on the npu rewritten. Their losses are the same."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from devices import DEVICE, VENDOR

from apex_npu import amp, compat
from apex_npu.migrate import Options, plan, rewrite
from apex_npu.migrate.rules.tables import SAME_NAMES
from apex_npu.migrate.run.running import Rewriter

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))


@pytest.fixture
def apex():
    compat.install_as_apex()
    yield
    compat.uninstall_apex()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_nothing_is_left(program):
    made = plan([program])
    assert {finding.status for finding in made.findings} == {"changed"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_portable_program(program, tmp_path, apex):
    original = runpy.run_path(str(program))
    amp.shutdown()
    changed = tmp_path / program.name
    rewritten = rewrite(program.read_bytes(), options=Options(ignore=("O",), to="portable"))
    changed.write_bytes(rewritten.source)
    whole = {finding.status for finding in rewritten.findings} == {"changed"}
    assert whole == (program.stem in ("gated", "with_apex"))
    if whole or DEVICE.type == "cpu":
        portable = runpy.run_path(str(changed))
        assert portable["where"] == DEVICE.type
        tolerance = 1e-3 if program.stem == "with_apex" else 1e-5 if VENDOR else 0
        assert portable["losses"] == pytest.approx(original["losses"], rel=tolerance, abs=0)


# Arguments with which functions of torch.cuda run without a GPU.
ARGUMENTS = {
    "device_of": "torch.ones(1)",
    "manual_seed": "0",
    "manual_seed_all": "0",
    "set_rng_state": "torch.get_rng_state()",
    "set_rng_state_all": "[]",
    "set_stream": "None",
    "stream": "None",
    "StreamContext": "None",
}
WAYS = (
    "answer = torch.cuda.{call}",
    "module = torch.cuda\nanswer = module.{call}",
    "answer = torch.cuda.memory.{call}",
    "answer = torch.cuda.random.{call}",
    "answer = 0\nif torch.ones(1).device.type == 'cuda':\n    answer = torch.cuda.{call}",
    "answer = 0\nif torch.ones(1).is_cuda:\n    answer = torch.cuda.{call}",
)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="without an accelerator")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_what_runs_without_a_gpu_does_so_in_portable_code(way):
    ran = set()
    for name in SAME_NAMES:
        program = "import torch\n" + way.format(call=f"{name}({ARGUMENTS.get(name, '')})")
        before: dict[str, Any] = {}
        try:
            exec(program, before)
        except Exception:
            continue
        rewritten = rewrite(program, options=Options(to="portable", unsure=True))
        if "module" in way or {one.status for one in rewritten.findings} <= {"changed", "note"}:
            after: dict[str, Any] = {}
            exec(rewritten.source, after)
            if isinstance(before["answer"], (int, list, dict, type(None))):
                assert after["answer"] == before["answer"], name
            ran.add(name)
    assert len(ran) >= (4 if "random" in way else 9 if "memory" in way else 20)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="without an accelerator")
@pytest.mark.parametrize(
    "program",
    [
        "torch.cuda.synchronize()",
        "torch.cuda.set_device(0), torch.cuda.current_device()",
        "event = torch.cuda.Event(); event.record(); event.synchronize()",
        "with torch.cuda.stream(torch.cuda.Stream()): torch.cuda.current_stream()",
        "with torch.autograd.profiler.profile(use_cuda=True): pass",
        "kind = {'cpu': 1, 'cuda': 2}['cpu']\nassert kind == 1",
        "assert ['cpu', 'cuda:0'][torch.cuda.is_available()] == 'cpu'",
        "device = torch.device('cpu')\nassert 'cuda' not in str(device) and device.type not in ('cuda', 'cuda:0')",
        "device = 'cpu'\nassert device != 'cuda:{}'.format(0) and device != 'cuda:%d' % 0 and device != 'cuda:' + '0'",
        "backend = 'gloo'\nassert backend != 'nccl'",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_portable_code_without_an_accelerator(program):
    for unsure in (False, True):
        rewritten = rewrite(f"import torch\n{program}\n", options=Options(to="portable", unsure=unsure))
        assert not {"refused"} & {finding.status for finding in rewritten.findings}
        exec(rewritten.source, {})


def test_a_program_that_gets_torch_from_another_file(tmp_path, monkeypatch):
    program = next(path for path in PROGRAMS if path.stem == "gated")
    (tmp_path / "passed_on.py").write_text("import torch\nfrom torch import nn\n")
    changed = tmp_path / program.name
    changed.write_text(program.read_text().replace("import torch\n", "from passed_on import *\n", 1))
    made = plan([tmp_path], Options(ignore=("O",)))
    assert {finding.status for finding in made.findings} == {"changed"}
    (new,) = made.files
    changed.write_bytes(new.after)
    monkeypatch.syspath_prepend(tmp_path)
    if DEVICE.type == "npu":
        ran = runpy.run_path(str(changed))
        assert ran["where"] == "npu"
        assert ran["losses"] == pytest.approx(runpy.run_path(str(program))["losses"], rel=1e-5 if VENDOR else 0, abs=0)


@pytest.mark.skipif(DEVICE.type != "npu", reason="the rewritten program runs on npu")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_losses_are_those_of_the_cpu(program, tmp_path, apex):
    original = runpy.run_path(str(program))
    amp.shutdown()
    changed = tmp_path / program.name
    changed.write_bytes(rewrite(program.read_bytes()).source)
    fused = runpy.run_path(str(changed))
    amp.shutdown()
    changed.write_bytes(rewrite(program.read_bytes(), options=Options(ignore=("O",))).source)
    rewritten = runpy.run_path(str(changed))
    assert (original["where"], rewritten["where"]) == ("cpu", "npu")
    tolerance = 1e-3 if program.stem == "with_apex" else 1e-5 if VENDOR else 0
    assert rewritten["losses"] == pytest.approx(original["losses"], rel=tolerance, abs=0)
    assert fused["losses"] == pytest.approx(original["losses"], rel=max(tolerance, 1e-5), abs=0)
    in_memory: dict[str, Any] = {"__name__": "rewritten"}
    amp.shutdown()
    exec(Rewriter(program.parent).compile(program.read_bytes(), str(program)), in_memory)
    assert (in_memory["where"], in_memory["losses"]) == ("npu", rewritten["losses"])
    assert len(set(original["losses"])) == len(original["losses"])
