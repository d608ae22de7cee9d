# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The backend "hccl", in processes of its own; what they check is in hccl_worker.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

WORKER = str(Path(__file__).with_name("hccl_worker.py"))


def torchrun(count: int, *checks: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={count}", WORKER, *checks]
    environment = {**os.environ, "PYTHONPATH": processes.PYTHONPATH}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=processes.HANG_TIMEOUT, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("count", [2, 4])
def test_collectives(count: int) -> None:
    torchrun(count, "collectives", "groups_and_objects")


def test_ddp_and_fsdp() -> None:
    torchrun(2, "ddp", "fsdp")


def test_a_dying_peer_is_noticed(tmp_path: Path) -> None:
    started = processes.start(Path(WORKER), ("dies",), 2, tmp_path / "store")
    (status, output), (peers_status, _) = processes.finish(started)
    assert status == 0, output
    assert "noticed: " in output
    assert peers_status == 3
