# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two processes: faults of both, a step that is skipped for the other one, and steps that are recorded, profiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch.distributed as dist
from devices import DEVICE, needs

NO_GLOO = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


@needs("inf")
@pytest.mark.slow
@NO_GLOO
def test_the_process_that_has_overflowed_is_named():
    worker = Path(__file__).with_name("ranks_worker.py")
    processes.run(worker, "distributed_data_parallel", "combine_ddp", "overflow_group", "replay", "on_one_process")


@needs("inf")
@pytest.mark.slow
@NO_GLOO
def test_planted_faults_in_two_processes():
    processes.run(Path(__file__).with_name("planted_worker.py"), "distributed_data_parallel", "combine_ddp")


@pytest.mark.slow
@NO_GLOO
def test_steps_of_two_processes():
    worker = Path(__file__).with_name("steps_worker.py")
    processes.run(worker, "gradients_are_the_averages", "each_has_its_table")


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo has tensors of the CPU")
@NO_GLOO
def test_processes_that_a_script_spawns(tmp_path):
    options = ["--profile", "1:9", "--trace", str(tmp_path / "traces"), "--record", f"0:{tmp_path / 'a.pt'}"]
    script = [str(Path(__file__).with_name("steps_worker.py")), str(tmp_path / "store")]
    ended = subprocess.run(
        [sys.executable, "-m", "apex_npu", "run", *options, *script],
        env={**os.environ, "PYTHONPATH": processes.PYTHONPATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=processes.HANG_TIMEOUT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    # The processes end before step 9, and without a process group; the first one of them prints what is known.
    assert sum(line.startswith("2 steps of ") for line in lines) == 1
    assert sum(line.startswith("--record: step 0 is in ") for line in lines) == 1
    assert any(line.startswith("--profile: the script has ended and no optimizer") for line in lines)
    assert sorted(p.name.partition(".1")[0] for p in (tmp_path / "traces").iterdir()) == ["rank0", "rank1"]
    assert sorted(p.name for p in tmp_path.glob("a.pt*")) == ["a.pt", "a.pt.rank1"]
