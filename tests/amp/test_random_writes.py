# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random programs that write weights, gradients and buffers; see ``random_writes.py``.

    PYTHONPATH=tests python -m amp.random_writes --programs 1000

runs more of them than the tests do, with ``--first-seed`` others.
"""

import pytest
import torch
from amp.random_programs import PARAMS
from amp.random_writes import DRAWN, LEVELS, UNCOUNTED, WRITES, Config, describe, run
from devices import DEVICE
from small_programs import WITH_MASTERS

# Of each kind of write: 50 and 1,000 of a level.
QUICK, MORE = 10, 200


def check(seeds, level, writes):
    first = next(filter(None, (describe(seed, level, writes) for seed in seeds)), None)
    assert first is None, first


programs = pytest.mark.parametrize(
    ("level", "writes"), [(level, writes) for level in LEVELS for writes in (*WRITES, "all")]
)


@programs
def test_programs(level, writes):
    check(range(QUICK), level, writes)


@pytest.mark.sweep
@programs
def test_more_programs(level, writes):
    check(range(QUICK, QUICK + MORE), level, writes)


# Programs in which writes have been lost, or made twice.

ALL = tuple(range(PARAMS))
BLOCK, STEP, SAVE = ("block", 32.0, ALL), ("step", True), ("save",)
INF = ("block", torch.inf, ALL)
FOUND = {
    "in place, then at another address": [
        *(BLOCK, STEP, ("write_model", "no_grad", (1,), "halve"), ("write_model", "other address", (1,), "fill")),
        *(BLOCK, STEP),
    ],
    "at addresses in one tensor, then one in place": [
        *(BLOCK, STEP, ("write_model", "vector", (1, 2, 4, 5), "halve"), BLOCK, STEP),
        *(("write_model", "no_grad", (4, 5), "negate"), BLOCK, STEP),
    ],
    "float32 data at addresses in one tensor, then one in place": [
        *(("write_float32", "context", "vector", (1, 2, 4, 5), "halve"), STEP, BLOCK, STEP),
        *(("write_float32", "context", "no_grad", (3, 4), "halve"), BLOCK, STEP),
    ],
    "float32 data, then the parameter": [
        *(BLOCK, STEP, ("write_float32", "loop", "data", (1, 3), "halve"), SAVE),
        *(("write_model", "view", (1, 3), "fill"), SAVE, BLOCK, STEP),
    ],
    "the parameter, then float32 data": [
        *(BLOCK, STEP, ("write_model", "view", (1, 3), "fill"), ("write_float32", "loop", "data", (1, 3), "halve")),
        *(SAVE, BLOCK, STEP),
    ],
    "float32 data, then a load of others": [
        *(BLOCK, STEP, ("write_float32", "context", "data", (2,), "fill"), ("load", (3, 5)), BLOCK, STEP),
    ],
    "float32 data, and a step without gradients": [
        *(BLOCK, STEP, ("write_float32", "context", "no_grad", (3,), "fill"), STEP, BLOCK, STEP),
    ],
    "between a skipped step and the next": [
        *(BLOCK, STEP, INF, ("write_model", "no_grad", (1, 3), "halve"), STEP, SAVE, BLOCK, STEP),
    ],
}


def run_found(operations, level, how):
    fuses = how == "fuse_unscale"
    run(Config(level, "sgd", "fused" if fuses else how, fuses, "dynamic", 0.5, 2.0**-4, False, False), operations)


HOWS = pytest.mark.parametrize("how", ["torch", "combine_grad", "fused", "float32", "fuse_unscale"])


@pytest.mark.pairwise
@HOWS
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("name", FOUND)
def test_found(name, level, how):
    run_found([*FOUND[name], SAVE], level, how)


# With fuse_unscale what is assigned would have to be scaled, and what a plain backward has left as well.
OUTSIDE = {
    "a backward before the block": [("backward", 1.0, (0, 2, 3)), BLOCK, STEP],
    "a backward before the block, that overflows": [("backward", torch.inf, (0, 2, 3)), BLOCK, STEP],
    "a backward alone": [("backward", 1.0, ALL), ("clip", "master_params", torch.inf, True), STEP],
    "a block after assigned gradients": [BLOCK, ("write_grads", "assign", (1, 2), "halve"), BLOCK, STEP],
    "a block after assigned float32 gradients": [
        *(BLOCK, ("write_grads", "assign float32", (1, 2), "halve"), BLOCK, STEP),
    ],
    "zeros that are written": [
        *(BLOCK, ("step", False), ("write_grads", "data", (1, 2), "fill"), ("step", False)),
        *(("write_grads", "no_grad", (3, 4), "fill"), BLOCK, ("step", False)),
        *(("write_grads", "assign", (4, 5), "fill"), ("step", False), STEP),
    ],
    "a backward alone among zeros": [
        *(BLOCK, ("step", False), ("backward", 1.0, (0, 2)), ("step", False), ("backward", 1.0, (0, 2)), STEP),
        *(("block", 1.0, (0, 2)), STEP),
    ],
    "gradients assigned where there were none": [BLOCK, STEP, ("write_grads", "assign", (1, 2), "halve"), STEP],
    "gradients assigned after blocks": [BLOCK, BLOCK, ("write_grads", "assign", (1, 2), "halve"), STEP],
    "float32 gradients assigned after blocks": [
        *(BLOCK, BLOCK, ("write_grads", "assign float32", (1, 2), "halve"), STEP),
    ],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("how", ["torch", "combine_grad", "fused", "float32"])
@pytest.mark.parametrize("level", [level for level in LEVELS if level != "O3"])  # whose arithmetic rounds
@pytest.mark.parametrize("name", OUTSIDE)
def test_gradients_from_outside_of_blocks(name, level, how):
    run_found(OUTSIDE[name], level, how)


# A fused optimizer gives parameters other addresses in its first step.
@pytest.mark.pairwise
@HOWS
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("idiom", [idiom for idiom in DRAWN if DEVICE.type == "cpu" or idiom not in UNCOUNTED])
def test_what_is_written_between_a_block_and_its_step_counts(idiom, level, steps, how):
    which = (1, 2) if idiom in ("vector", "foreach") else (1,)
    write = ("write_model", idiom, which, "halve")
    run_found([*steps * [BLOCK, STEP], BLOCK, write, SAVE, BLOCK, STEP, SAVE], level, how)
