# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The runner of Apex's own tests: its source rewriting, and its report of outcomes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from upstream.run_upstream import for_device, main

RUNNER = Path(__file__).with_name("run_upstream.py")
ROOT = RUNNER.parents[2]


@pytest.mark.parametrize(
    ("source", "on_cpu", "on_npu"),
    [
        ("x.cuda()", "x.to('cpu')", "x.to('npu')"),
        ('torch.ones(2, device="cuda")', "torch.ones(2, device='cpu')", "torch.ones(2, device='npu')"),
        ("HALF = 'torch.cuda.HalfTensor'", "HALF = 'torch.HalfTensor'", "HALF = 'torch.npu.HalfTensor'"),
        (
            "torch.set_default_tensor_type(torch.cuda.FloatTensor)",
            "torch.set_default_device('cpu')",
            "torch.set_default_device('npu')",
        ),
        ("x.cpu(); 'torch.FloatTensor'", "x.cpu(); 'torch.FloatTensor'", "x.cpu(); 'torch.FloatTensor'"),
        ("torch.cuda.manual_seed(1)", "torch.manual_seed(1)", "torch.manual_seed(1)"),
    ],
)
def test_names_of_cuda_become_those_of_the_device(source, on_cpu, on_npu):
    assert (for_device(source, "cpu"), for_device(source, "npu")) == (on_cpu, on_npu)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(RUNNER), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_outcomes_are_told_apart(tmp_path):
    folder = tmp_path / "tests" / "L0" / "run_amp"
    folder.mkdir(parents=True)
    (folder / "utils.py").write_text("FLOAT = 'torch.cuda.FloatTensor'")
    (folder / "test_one.py").write_text(
        "import unittest\nimport torch\nfrom apex import amp\nfrom utils import FLOAT\n"
        "class T(unittest.TestCase):\n"
        "    def test_passes(self):\n        self.assertEqual(torch.ones(1, device='cuda').type(), FLOAT)\n"
        "    def test_fails(self):\n        self.assertTrue(hasattr(amp, 'nonsense'))\n"
        "    @unittest.skip('no kernels')\n    def test_skips(self):\n        pass\n"
    )
    result = run(str(tmp_path))
    assert result.returncode == 1, result.stderr
    assert "passed   test_one.T.test_passes" in result.stdout
    assert "(no kernels)" in result.stdout
    assert "AssertionError: False is not true" in result.stdout
    assert result.stdout.endswith("1 passed, 1 skipped, 1 FAILED\n")
    assert run(str(tmp_path), "-k", "passes").returncode == 0


def test_a_folder_that_is_no_checkout_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(RUNNER), str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"{tmp_path} has no tests/L0/run_amp" in capsys.readouterr().err
