# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Muon in several processes. The checks are in the worker beside; starting the processes takes the longest."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import torch.distributed as dist
from devices import DEVICE

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

WORKER = Path(__file__).with_name("muon_worker.py")
CHECKS = {
    2: (
        "same_as_whole",
        "repetition",
        "small_batches",
        "levels",
        "bytes_on_the_wire",
        "refusals",
        "checkpoints",
        "state_dicts_of_torch",
    ),
    4: ("same_as_whole", "replicas"),
}
# What two processes show as well.
OF_FOUR = ("repetition", "small_batches", "bytes_on_the_wire", "refusals", "checkpoints")
if DEVICE.type == "cpu":
    CHECKS[2] += ("formats_of_momentum",)
AGAIN = pytest.mark.sweep if DEVICE.type == "npu" else pytest.mark.slow


@pytest.mark.parametrize(
    ("count", "checks"),
    [
        pytest.param(2, CHECKS[2], marks=pytest.mark.slow),
        pytest.param(4, CHECKS[4], marks=AGAIN),
        pytest.param(4, OF_FOUR, marks=pytest.mark.sweep),
    ],
    ids=["2", "4", "4-again"],
)
def test_matrices_of_dtensors_are_stepped_whole(count, checks):
    processes.run(WORKER, *checks, processes=count)


# A killed process is noticed as its connections close, one that is stopped once the group's patience has run out.
@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo notices a killed process by its connections")
@pytest.mark.parametrize(
    ("signal", "patience"), [("SIGKILL", processes.HANG_TIMEOUT), pytest.param("SIGSTOP", 20, marks=pytest.mark.sweep)]
)
def test_a_process_that_is_lost_in_an_exchange_is_an_error_on_all_others(signal, patience, tmp_path):
    options = {"SIGNAL": signal, "PATIENCE": str(patience)}
    started = processes.start(WORKER, ("lost_in_an_exchange",), 3, tmp_path / "store", **options)
    lost = started.pop(1)
    try:
        results = processes.finish(started)
    finally:
        processes.finish_by_force([lost])
    for rank, (status, output) in zip((0, 2), results, strict=True):
        assert status == 0, output
        assert f"rank {rank} of 3 could not exchange parts of matrices: " in output
