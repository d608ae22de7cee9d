# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What sharded_steps.py measures runs, and what it compares computes the same."""

import os
from pathlib import Path

import processes
import pytest
import torch.distributed as dist

STUDIES = Path(__file__).parent


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_what_is_measured_of_sharded_models_runs():
    path = os.pathsep.join([processes.PYTHONPATH, str(STUDIES.parent), str(STUDIES)])
    checks = ("bare", "backward", "whole", "trainings", "memory")
    processes.run(STUDIES / "sharded_steps_worker.py", *checks, processes=1, PYTHONPATH=path)
