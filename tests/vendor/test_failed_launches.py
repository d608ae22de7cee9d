# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""After a failed launch a step can be repeated with the same result, or raises an error that says it cannot."""

import json
import os
from pathlib import Path

import host_cann
import processes
import pytest

WORKER = Path(__file__).with_name("failed_launches_worker.py")
PATHS = os.pathsep.join(map(str, (processes.ROOT, processes.ROOT / "tests", Path(host_cann.__file__).parents[1])))
FUSED = ("SGD", "Adam", "AdamW", "Lamb", "AdamP")


def let_all_fail(level, *names, queue="1"):
    """For each launch of each optimizer's step: whether another try ended like an uninterrupted run, and the error."""
    environment = {"PYTHONPATH": PATHS, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TASK_QUEUE_ENABLE": queue}
    (said,) = processes.run(WORKER, level, *names, processes=1, **environment)
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert {row["name"] for row in rows} == set(names)
    return rows


# Without torch_npu's queue an error comes at the call, and with it at a later one.
@pytest.mark.parametrize(("level", "queue"), [("plain", "0"), ("plain", "1"), ("O1", "1"), ("O2", "0"), ("O2", "1")])
def test_a_launch_that_fails_ends_a_step_that_can_be_repeated_or_says_that_it_cannot(level, queue):
    rows = let_all_fail(level, *FUSED, queue=queue)
    silent = [row for row in rows if not row["repeated"] and "this step cannot be repeated" not in row["said"]]
    assert not silent
    # Gradients are gathered before anything is updated; with amp unscaling has done that.
    assert level != "plain" or any("cannot be repeated" not in row["said"] for row in rows)


def test_masters_that_have_not_come_to_the_model_are_copied_by_another_step():
    rows = let_all_fail("O2", "torch.optim.SGD")
    assert rows[-1]["repeated"]  # the last launches are those of the copy
