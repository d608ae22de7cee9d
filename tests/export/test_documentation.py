# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The code of docs/export.md runs, and prints what is shown there."""

import re
from pathlib import Path

import pytest
import torch

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


def test_each_block_of_code_is_run():
    assert len(BLOCKS) == TEXT.count("```python") == 5


def test_the_tolerances_are_those_of_the_code():
    rows = re.findall(r"^\| (float\d+) \| (\S+) \|", TEXT, flags=re.MULTILINE)
    assert {getattr(torch, name): float(value) for name, value in rows} == onnx.TOLERANCES
