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
@pytest.mark.parametrize(
    ("level", "queue"),
    [
        *(("plain", "0"), ("O1", "1"), ("O2", "1")),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in (("plain", "1"), ("O2", "0"))),
    ],
)
def test_a_launch_that_fails_ends_a_step_that_can_be_repeated_or_says_that_it_cannot(level, queue):
    rows = let_all_fail(level, *FUSED, queue=queue)
    silent = [row for row in rows if not row["repeated"] and "this step cannot be repeated" not in row["said"]]
    assert not silent
    # Gradients are gathered before anything is updated; with amp unscaling has done that.
    assert level != "plain" or any("cannot be repeated" not in row["said"] for row in rows)


def test_masters_that_have_not_come_to_the_model_are_copied_by_another_step():
    rows = let_all_fail("O2", "torch.optim.SGD")
    assert rows[-1]["repeated"]  # the last launches are those of the copy


ASYNCHRONOUS = Path(__file__).with_name("asynchronous_failures_worker.py")


def let_one_fail(prefix, launch, when, queue="1"):
    environment = {"PYTHONPATH": PATHS, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TASK_QUEUE_ENABLE": queue}
    (said,) = processes.run(ASYNCHRONOUS, prefix, str(launch), when, processes=1, **environment)
    return json.loads(next(line for line in said.splitlines() if line.startswith("{")))


# Of the step of NpuFusedAdam at O2: CANN's AdamW, which is of the older interface, and what adds to the moments and
# copies to the model. Operators of aclnn are planned, which "call" is, before they are queued.
@pytest.mark.parametrize(
    ("prefix", "launch", "when"),
    [
        ("aclop", 0, "launch"),
        pytest.param("aclop", 0, "call", marks=pytest.mark.slow),
        *(pytest.param("aclnn", launch, "launch", marks=pytest.mark.slow) for launch in range(3)),
    ],
)
def test_a_launch_that_fails_in_the_queue_is_an_error_before_another_step_is_counted(prefix, launch, when):
    """It comes at the latest where the next block reads its flag, once; and torch_npu computes nothing from then on."""
    found = let_one_fail(prefix, launch, when)
    (part, said), *later = found["errors"]
    assert part in ("step 1", "block 2", "after")
    assert "The process exits for this inner error" in said
    assert part != "step 1" or "start a new process, from a checkpoint" in said
    assert not later
    assert found["scale"] == 16
    assert not found["computes"]  # what torch_npu does not say
    assert found["unchanged"] or prefix == "aclnn"


@pytest.mark.parametrize(
    ("prefix", "launch"),
    [("aclop", 0), *(pytest.param("aclnn", launch, marks=pytest.mark.slow) for launch in range(3))],
)
def test_a_launch_that_fails_while_it_runs_is_an_error_before_another_step_is_counted(prefix, launch):
    found = let_one_fail(prefix, launch, "run")
    (part, said), *later = found["errors"]
    assert part in ("step 1", "block 2", "after")
    assert "507015" in said
    assert not later
    assert found["scale"] == 16
    assert found["computes"]


@pytest.mark.parametrize("when", ["call", pytest.param("launch", marks=pytest.mark.slow)])
def test_without_the_queue_a_launch_of_the_older_interface_fails_in_the_step(when):
    found = let_one_fail("aclop", 0, when, queue="0")
    (part, said), *later = found["errors"]
    assert part == "step 1"
    assert "this step cannot be repeated. Load the model and the optimizer from a checkpoint" in said
    assert "ApplyAdamW" in said
    assert not later
    assert found["computes"]
