# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whole training loops on the vendor's torch_npu: the losses are those of the CPU, in whatever order it works."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICE
from vendor import loops

MODELS = tuple(loops.SHAPES)
ALL = list(itertools.product(MODELS, loops.LEVELS, loops.OPTIMIZERS, (False, True)))
# Each model, level and optimizer is among the quick ones, if not with each other.
QUICK = {(MODELS[j % 3], level, name, bool((i + j) // 3 % 2)) for i, level in enumerate(loops.LEVELS)
         for j, name in enumerate(loops.OPTIMIZERS) if (i + j) % 3 == 0}  # fmt: skip
# The unit in the last place of what a level computes in.
EPS = {"O0": 2.0**-23} | dict.fromkeys(("O1", "O2", "O3"), 2.0**-10) | dict.fromkeys(("O4", "O5"), 2.0**-7)


def test_there_are_324_loops():
    assert len(ALL) == 324
    assert {row[k] for row in QUICK for k in range(4)} >= {*MODELS, *loops.LEVELS, *loops.OPTIMIZERS, True, False}


@pytest.mark.parametrize(
    ("model", "level", "optimizer", "combine_grad"),
    [pytest.param(*row, marks=[] if row in QUICK else pytest.mark.slow) for row in ALL],
)
def test_losses_are_those_of_the_cpu(model, level, optimizer, combine_grad):
    ours = loops.losses(model, level, optimizer, combine_grad, DEVICE)
    cpu = loops.losses(model, level, optimizer, combine_grad, torch.device("cpu"))
    assert ours[-1] < ours[0]
    # A step's rounding, which the following ones pass on: sums of up to 200 products, and a few layers of them.
    for step, (a, b) in enumerate(zip(ours, cpu, strict=True), 1):
        assert abs(a - b) <= 16 * step * EPS[level] * cpu[0], (step, ours, cpu)


def test_losses_do_not_depend_on_when_the_device_works():
    """Three modes of torch_npu's task queue, and work that is done late, in the background, or in the call."""
    levels = ("O1", "O2")
    expected = [str(x) for level in levels for x in loops.losses("transformer", level, "NpuFusedAdam", True, DEVICE)]
    for queue, mode in [("0", "lazy"), ("1", "background"), ("2", "lazy"), ("2", "blocking")]:
        command = [sys.executable, "-W", "ignore", Path(loops.__file__), "transformer", "NpuFusedAdam", "True", *levels]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "TASK_QUEUE_ENABLE": queue, "HOST_CANN_MODE": mode, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.split() == expected, (queue, mode)
