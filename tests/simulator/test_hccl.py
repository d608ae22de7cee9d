# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The backend "hccl", in processes of its own; what they check is in hccl_worker.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

WORKER = str(Path(__file__).with_name("hccl_worker.py"))


def torchrun(processes: int, *checks: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", WORKER, *checks]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("processes", [2, 4])
def test_collectives(processes: int) -> None:
    torchrun(processes, "collectives", "groups_and_objects")


def test_ddp_and_fsdp() -> None:
    torchrun(2, "ddp", "fsdp")


def test_a_dying_peer_is_noticed_within_the_timeout(tmp_path: Path) -> None:
    timeout = 20
    environment = {**os.environ, "WORLD_SIZE": "2", "STORE": str(tmp_path / "store"), "TIMEOUT": str(timeout)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", WORKER, "dies"],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    begin = time.monotonic()
    try:
        output = processes[0].communicate(timeout=timeout + 40)[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode == 0, output
    assert "noticed: " in output
    assert processes[1].returncode == 3
    assert time.monotonic() - begin < timeout + 40
