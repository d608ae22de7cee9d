# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Faults that torchrun answers by starting all processes again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
from devices import DEVICE

pytestmark = [
    pytest.mark.device,
    # On a device training is resumed bit for bit in tests/examples/test_imagenet.py; torchrun is the same one.
    pytest.mark.sweep if DEVICE.type == "npu" else pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
]
WORKER = Path(__file__).with_name("restart_worker.py")


def torchrun(folder, fatal_step):
    folder.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([processes.PYTHONPATH, str(WORKER.parent)]),
        "OMP_NUM_THREADS": "1",
        # Else gloo finds the addresses of the processes that are gone in the store that torchrun keeps.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", *command, str(WORKER), str(folder), str(fatal_step)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=processes.HANG_TIMEOUT,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def assert_bit_equal(found, expected, where=""):
    assert type(found) is type(expected), where
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_bit_equal(found[name], value, f"{where}[{name!r}]")
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_bit_equal(found[i], value, f"{where}[{i}]")
    elif isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


def test_a_training_that_was_killed_in_backward_and_restarted_ends_bit_for_bit_as_one_that_was_not(tmp_path):
    torchrun(tmp_path / "whole", -1)
    torchrun(tmp_path / "killed", 5)
    expected = {path.name: torch.load(path) for path in (tmp_path / "whole").glob("step_*.pt")}
    assert len(expected) == 8
    # The fault was one: all steps before it were saved, and the one that it ended was not.
    (resumed,) = (tmp_path / "killed").glob("resumed_*.pt")
    assert resumed.name == "resumed_4.pt"
    assert_bit_equal(torch.load(resumed), expected["step_4.pt"], "what was resumed from")
    for name, state in expected.items():
        assert_bit_equal(torch.load(tmp_path / "killed" / name), state, name)
    # The loss scale has moved both ways on the way there.
    scales = [expected[f"step_{step}.pt"]["amp"]["loss_scaler0"]["loss_scale"] for step in range(8)]
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0, 1024.0]
