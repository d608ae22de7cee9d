# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What sharded_steps.py measures, on the device, of models that are small; nothing is timed.

Run in one process; the arguments are names of functions here.
"""

import sys

import processes
import report
import sharded_steps
import torch
from devices import DEVICE
from rounds import RESULTS, read_csv

from apex_npu import amp


def check_steps(variants, name):
    table = sharded_steps.steps(DEVICE, variants, count=1, rounds=2)
    left_out = () if DEVICE.type == "cpu" else sharded_steps.SLOW_TO_BEGIN
    assert [row["variant"] for row in table] == [name for name in variants if name not in left_out]
    assert {row["workload"] for row in table} == {"4 DTensors, 1 process"}
    assert all(float(row["median_ms"]) > 0.0 for row in table)
    assert read_csv(RESULTS / f"{name}_cpu.csv")[0].keys() <= table[0].keys()
    assert len(report.sharded(table).splitlines()) == 4 + len(table)


def bare():
    check_steps(sharded_steps.BARE, "sharded_steps")


def backward():
    check_steps(sharded_steps.AFTER_BACKWARD, "sharded_backward_steps")


def whole():
    check_steps(sharded_steps.WHOLE, "sharded_whole_steps")


def trainings():
    """Those whose memory is compared compute the same."""
    for level, variant, options in sharded_steps.TRAININGS:
        trained = []
        for given in options, {"by_torch": True}:
            training = sharded_steps.Training(DEVICE, level, **given)
            for _ in range(3):
                training.step()
                training.clear()
            trained.append(torch.cat([p.to_local().detach().flatten() for p in training.model.parameters()]))
            amp.shutdown()
        # Of three steps of 1e-3; a gradient near 0, of which clipping rounds another bit, may have either sign.
        differ = (trained[0] - trained[1]).abs() > (1e-6 if level == "O0" else 1e-4)
        assert differ.float().mean() < (0.0 if level == "O0" else 0.02) + 1e-9, (level, variant)


def memory():
    """Nothing of a training is left to the next one."""
    if DEVICE.type == "cpu":
        return
    sharded_steps.WIDTH = 256
    table = sharded_steps.memory(DEVICE)
    assert len({row["before_mb"] for row in table}) == 1, [row["before_mb"] for row in table]
    params = sharded_steps.COUNT * 256 * 257 * 4 / 1e6
    for row in table:
        at_most, stepped, cleared = (float(row[name]) for name in ("peak_mb", "stepped_mb", "cleared_mb"))
        # With two moments; with gradients; with those of one unit that are not reduced yet.
        assert round(3 * params, 1) <= cleared
        assert round(4 * params, 1) <= stepped < at_most
    assert len(report.sharded_memory(table).splitlines()) == 6 + len(table)


if __name__ == "__main__":
    processes.join()
    sharded_steps.COUNT, sharded_steps.WIDTH = 2, 32
    for check in sys.argv[1:]:
        globals()[check]()
        amp.shutdown()
    processes.leave()
