# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""bfloat16 DTensors in several processes. The checks are in the worker beside."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import torch.distributed as dist

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")]

WORKER = Path(__file__).with_name("low_precision_shards_worker.py")


def test_bfloat16_shards_are_stepped_exactly():
    checks = ("rules_without_amp", "remainders_of_8_bits", "torchs_rule", "under_amp", "checkpoints", "refusals")
    processes.run(WORKER, *checks)
