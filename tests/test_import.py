# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Importing the library brings nothing that it does not need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from apex_npu.__main__ import main

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
import torch
before = set(sys.modules)
import apex_npu
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def python(program: str, **variables: str) -> str:
    """What ``program`` prints, in an interpreter of its own that turns every warning into an error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_import_brings_no_optional_package():
    new = set(python(PROGRAM.replace("import torch\n", "import warnings, torch\n")).split())
    assert "apex_npu" in new
    assert not new & {"triton", "matplotlib", "sklearn", "scipy", "tqdm", "pytest", "setuptools"}
    assert not new & {"onnx", "onnxscript", "onnxruntime", "safetensors", "rich"}


def test_import_without_the_extension():
    program = "import apex_npu, sys; print('apex_npu._C' in sys.modules, apex_npu.__version__)"
    assert python(program, APEX_NPU_NO_EXT="1").split() == ["False", "0.1.0"]


def test_optimizers_may_be_imported_first():
    assert python("from apex_npu import optimizers; print(optimizers.__name__)").strip() == "apex_npu.optimizers"


def test_import_needs_no_torch():
    program = """
import sys
sys.modules["torch"] = None  # importing it fails
import apex_npu
from apex_npu import compat
from apex_npu.compat import apex_hook, apex_name, finder, table
from apex_npu.compat.pipeline import patching
assert not [name for name in sys.modules if name.partition(".")[0] == "numpy"]
print(apex_npu.__version__, "fp16_utils" in dir(apex_npu), compat.MODULES["apex.parallel"])
try:
    apex_npu.amp
except ImportError as error:
    print(error.name)
"""
    assert python(program).splitlines() == ["0.1.0 True apex_npu.compat.parallel", "torch"]


OLD = ("contrib", "fp16_utils", "multi_tensor_apply", "names", "normalization", "packing", "parallel", "pipeline")


def test_import_brings_neither_old_modules_nor_integrations():
    program = """
import sys
from apex_npu import amp, optimizers
print(*sys.modules)
import apex_npu.compat, apex_npu.__main__
print(*sys.modules)
apex_npu.fp16_utils.tofp16
"""
    modules, of_commands = map(str.split, python(program).splitlines())
    assert not {*modules} & {f"apex_npu.{package}{name}" for package in ("", "compat.") for name in OLD}
    assert [name for name in of_commands if name.startswith("apex_npu.integrations")] == []


def test_the_root_is_small():
    entries = [entry for entry in (ROOT / "apex_npu").iterdir() if not entry.name.startswith(("__pycache__", "_C.c"))]
    entries = [entry for entry in entries if entry.name != "_C.torch_version" and entry.suffix != ".pyd"]
    # 14, and one entry for each capability: debug, doctor, export, integrations, migrate, transfer.py.
    assert len(entries) <= 20, sorted(entry.name for entry in entries)


def test_the_program_takes_its_arguments_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["apex-npu", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "doctor" in capsys.readouterr().out
