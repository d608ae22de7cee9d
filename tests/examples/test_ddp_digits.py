# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The example of data parallel training."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# Not imported by each process that collects tests: it takes seconds.
if any(importlib.util.find_spec(name) is None for name in ("sklearn", "matplotlib", "tqdm")):
    pytest.skip("what the examples need is not installed", allow_module_level=True)

SCRIPT = str(Path(__file__).parents[2] / "examples" / "ddp_digits.py")


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.slow
def test_all_engines_give_the_same_losses_and_parts_take_half_of_the_memory(start_example):
    result = start_example("ddp_digits.py", "--device", "cpu", "--epochs", "1", processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line]
    assert [line.split()[0] for line in lines] == ["combine_ddp", "ddp", "fully_shard", "losses"]
    assert lines[3].startswith("losses agree")
    losses = [line.split("last loss ")[1].split()[0] for line in lines[:3]]
    assert losses[0] == losses[1] == losses[2]
    whole, of_ddp, part = (int(re.search(r"(\d+) KiB a process", line).group(1)) for line in lines[:3])
    assert whole == of_ddp
    assert 0.5 <= part / whole < 0.52


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.slow
def test_a_training_goes_on_from_its_checkpoint_as_if_it_had_not_been_interrupted(start_example, tmp_path):
    common = ("--device", "cpu", "--engine", "combine_ddp", "--opt-level", "O2", "--checkpoint")
    for name, epochs in (("whole", 2), ("parts", 1), ("parts", 2)):
        options = (*common, str(tmp_path / name), "--epochs", str(epochs))
        result = start_example("ddp_digits.py", *options, processes=2)
        assert result.returncode == 0, result.stdout + result.stderr
    whole, parts = (torch.load(tmp_path / name) for name in ("whole", "parts"))
    assert whole["losses"] == parts["losses"]
    assert whole["amp"] == parts["amp"]
    for name, value in whole["model"].items():
        assert torch.equal(parts["model"][name], value), name
    before = "import os; os.environ['LOCAL_RANK'] = '0'"
    result = start_example("ddp_digits.py", "--checkpoint", str(tmp_path / "whole"), before=before)
    assert "name it, as in --engine combine_ddp" in result.stderr


def test_without_torchrun_it_says_how_to_start_it(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(SCRIPT).parent))
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(SCRIPT, run_name="__main__")
    said = capsys.readouterr().err.strip()
    assert said.endswith("start it with torchrun: torchrun --nproc-per-node 2 examples/ddp_digits.py")
