# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two processes: options of ``combine_ddp`` take effect, and DistributedDataParallel averages stepped gradients.

The checks are in ``under_amp_worker.py``; one start of two processes makes all of them.
"""

from pathlib import Path

import processes
import pytest
import torch.distributed as dist
from distributed.under_amp_worker import CHECKS

pytestmark = [
    pytest.mark.device,
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
]


@pytest.fixture(scope="module")
def verdicts(made_once):
    """Of each check: the failures of both processes, as [type, text], or None."""
    return made_once("verdicts", lambda: processes.results_of(Path(__file__).with_name("under_amp_worker.py")))


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(verdicts, name):
    failures = [failure for (failure,) in verdicts[name]]
    assert len(failures) == 2
    for kind, text in filter(None, failures):
        raise (AssertionError if kind == "AssertionError" else RuntimeError)(text)
