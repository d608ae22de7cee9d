# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Several processes over the vendor's ProcessGroupHCCL, whose errors come asynchronously and after a timeout."""

import functools
import json
import os
import re
from pathlib import Path

import host_cann
import processes
import pytest

WORKER = Path(__file__).with_name("hccl_worker.py")
# Half precision rounds what one process computes in one piece, and several in parts.
TOLERANCE = {"rel": 4e-3, "abs": 1e-4}
PATHS = os.pathsep.join(map(str, (processes.ROOT, processes.ROOT / "tests", Path(host_cann.__file__).parents[1])))
ENVIRONMENT = {
    "PYTHONPATH": PATHS,
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HOST_CANN_HCCL_TIMEOUT": str(processes.HANG_TIMEOUT),
}


# By the number of processes: starting them takes longer than a training.
WAYS = {
    1: ("O1-alone", "O2-alone", "O2-alone_by_adam"),
    2: ("O1-combine_ddp", "O2-combine_ddp", "O1-ddp", "O2-ddp", "O2-fully_shard"),
    4: ("O2-combine_ddp",),
}


@functools.cache
def trained(count):
    """Of each way: what each process has printed."""
    said = processes.run(WORKER, "train", *WAYS[count], processes=count, **ENVIRONMENT)
    of_ranks = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]
    return dict(zip(WAYS[count], zip(*of_ranks, strict=True), strict=True))


@pytest.mark.parametrize(("count", "way"), [(count, way) for count in (2, 4) for way in WAYS[count]])
def test_processes_train_as_one_that_sees_the_whole_batch(count, way):
    level, engine = way.split("-")
    (alone,) = trained(1)[f"{level}-alone_by_adam" if engine == "fully_shard" else f"{level}-alone"]
    ranks = trained(count)[way]
    assert [rank["applied"] for rank in ranks] == [alone["applied"]] * count
    assert alone["applied"].count(False) == 1
    assert len({rank["hash"] for rank in ranks}) == 1
    means = [sum(losses) / count for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
    finite = alone["applied"]
    assert [mean for mean, known in zip(means, finite, strict=True) if known] == pytest.approx(
        [loss for loss, known in zip(alone["losses"], finite, strict=True) if known], **TOLERANCE
    )
    assert alone["losses"][-1] < 0.7 * alone["losses"][0]


def test_a_process_that_is_lost_is_an_error_that_says_how_far_each_got(tmp_path):
    started = processes.start(WORKER, ("killed",), 2, tmp_path / "store", **ENVIRONMENT)
    try:
        status, output = processes.finish(started[:1])[0]
    finally:
        processes.finish_by_force(started[1:])
    assert status == 0, output
    assert "noticed: rank 0 could not average its gradients with the other processes" in output
    assert "failed in reduction 4" in output
    assert re.search(r"rank 0 had completed 3 and failed in .*; rank 1 had completed \d and begun a backward", output)
