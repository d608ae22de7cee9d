# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Several processes: a step that is skipped for another one, and faults that all of them have."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import torch.distributed as dist
from devices import needs


@needs("inf")
@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_the_process_that_has_overflowed_is_named():
    worker = Path(__file__).with_name("ranks_worker.py")
    processes.run(worker, "distributed_data_parallel", "combine_ddp", "overflow_group", "replay", "on_one_process")


@needs("inf")
@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_planted_faults_in_two_processes():
    processes.run(Path(__file__).with_name("planted_worker.py"), "distributed_data_parallel", "combine_ddp")
