# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the host CANN counts of a sequence that is known, and what ``python -m host_cann`` does and prints."""

from __future__ import annotations

from typing import Any

import host_cann
import torch


def test_a_known_sequence(npu: torch.device) -> None:
    x, y = torch.ones(10, device=npu), torch.ones(10, device=npu)
    with host_cann.count() as counted:
        z = x + y
        z.mul_(y)
        torch._foreach_mul_([x, y], 2.0)
    assert dict(counted.by_op) == {"aclnnAdd": 1, "aclnnInplaceMul": 1, "aclnnForeachMulScalarV2": 1}
    assert counted.rows["aclnnAdd f32 f32 f32"] == 1
    assert counted.launches == 3
    assert counted.bytes == 4 * 10 * (3 + 2 + 4)
    assert counted.syncs == 0
    assert not counted.copies


def test_copies_and_waits(npu: torch.device) -> None:
    x = torch.arange(6.0)
    with host_cann.count() as counted:
        y = x.to(npu)
        y.tolist()
        y[1].item()
    assert (counted.h2d, counted.d2h) == (1, 2)
    assert counted.copies == {"h2d": 1, "d2h": 2}
    assert counted.syncs == counted.waits.total() == 3
    assert counted.launches == 0


def test_each_block_counts_its_own(npu: torch.device) -> None:
    x = torch.ones(3, device=npu)
    x + 1  # still in torch_npu's queue
    with host_cann.count() as first:
        pass
    with host_cann.count() as second:
        x + 1
    assert (first.launches, first.syncs) == (0, 0)
    assert (second.launches, second.syncs) == (1, 0)


SCRIPT = """
import sys, torch
print(sys.argv[1:], __name__, torch.zeros(2, device="DEVICE").add(1).tolist())
"""


def test_scripts_run(run_script: Any) -> None:
    done = run_script(SCRIPT.replace("DEVICE", "npu"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "__main__", "[1.0,", "1.0]"]
    assert "operators" not in done.stderr


def test_cuda_means_npu_with_transfer(run_script: Any) -> None:
    done = run_script(SCRIPT.replace("DEVICE", "cuda"), "-m", "host_cann", "--transfer")
    assert done.returncode == 0, done.stderr
    assert "[1.0, 1.0]" in done.stdout


def test_modules_run(run_script: Any) -> None:
    done = run_script('{"read": "by a module"}', "-m", "host_cann", "-m", "json.tool", "--compact")
    assert done.stdout.strip() == '{"read":"by a module"}', done.stderr


def test_a_script_is_told_what_is_missing(run_script: Any) -> None:
    code = """
import torch, torch_npu
x = torch.ones(2, 3, 8, 8, device="npu")
torch_npu.npu_stride_add(x, x, 0, 0, 1)
torch.npu.synchronize()
"""
    done = run_script(code, TASK_QUEUE_ENABLE="0")
    assert done.returncode != 0
    assert "StrideAdd" in done.stderr.splitlines()[-1]
