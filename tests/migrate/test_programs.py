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


def test_a_portable_program(tmp_path):
    program = next(path for path in PROGRAMS if path.stem == "gated")
    changed = tmp_path / program.name
    rewritten = rewrite(program.read_bytes(), options=Options(ignore=("O",), to="portable"))
    assert {finding.status for finding in rewritten.findings} == {"changed"}
    changed.write_bytes(rewritten.source)
    portable = runpy.run_path(str(changed))
    assert portable["where"] == DEVICE.type
    assert portable["losses"] == pytest.approx(runpy.run_path(str(program))["losses"], rel=1e-5 if VENDOR else 0, abs=0)


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
