# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The code of docs/export.md runs, and prints what is shown there."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import apex_npu.export
from apex_npu import amp
from apex_npu.export import onnx

TEXT = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "block",
    [pytest.param(i, marks=[pytest.mark.slow] if "to_onnx" in BLOCKS[i][0] else []) for i in range(len(BLOCKS))],
)
def test_a_block_prints_what_is_shown(block, tmp_path, monkeypatch, capsys):
    code, shown = BLOCKS[block]
    if "to_onnx" in code:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(name, reason=f"{name} is not installed")
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "export.md", "exec"), {"__name__": "__main__"})
    amp.shutdown()
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("name", ["load_weights", pytest.param("to_onnx", marks=pytest.mark.slow)])
def test_the_example_of_the_docstring(name, tmp_path, monkeypatch):
    if name == "to_onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 2)
    names = {"torch": torch, "amp": amp, "apex_npu": apex_npu, "model": model, "input": torch.ones(3, 4)}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    docstring = inspect.getdoc(getattr(apex_npu.export, name))
    examples = doctest.DocTestParser().get_doctest(docstring, names, name, None, None)
    assert examples.examples
    assert doctest.DocTestRunner().run(examples).failed == 0
    amp.shutdown()


def test_each_block_of_code_is_run():
    assert len(BLOCKS) == TEXT.count("```python") > 0


def test_the_tolerances_are_those_of_the_code():
    rows = re.findall(r"^\| (float\d+) \| (\S+) \|", TEXT, flags=re.MULTILINE)
    assert {getattr(torch, name): float(value) for name, value in rows} == onnx.TOLERANCES
