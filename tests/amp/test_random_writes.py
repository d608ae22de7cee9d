# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random programs that write weights, masters, gradients and buffers; see ``random_writes.py``.

    PYTHONPATH=tests python -m amp.random_writes --programs 1000

runs more of them than the tests do, with ``--first-seed`` others.
"""

import pytest
from amp.random_programs import PARAMS
from amp.random_writes import LEVELS, WRITES, Config, describe, run
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


# Programs that have differed.

ALL = tuple(range(PARAMS))
BLOCK, STEP = ("block", 32.0, ALL), ("step", True)
FOUND = {
    "masters at addresses in one tensor, then some of them in place": [
        *(("write_masters", "vector", (1, 2, 4, 5), "halve"), STEP, BLOCK, STEP),
        *(("write_masters", "no_grad", (3, 4), "halve"), BLOCK, STEP),
    ],
    "the model, uncounted, before the first step": [BLOCK, ("write_model", "data", (1,), "halve"), STEP],
    "masters, uncounted, before the first step": [("write_masters", "data", (1,), "halve"), BLOCK, STEP],
    "the model in place, then at another address": [
        *(BLOCK, STEP, ("write_model", "no_grad", (1,), "halve"), ("write_model", "other address", (1,), "fill")),
        *(BLOCK, STEP),
    ],
    "the model at another address, then in place": [
        *(BLOCK, STEP, ("write_model", "vector", (1, 2), "negate"), BLOCK, ("write_model", "data", (1, 2), "fill")),
        STEP,
    ],
    "the model, uncounted, and another at another address": [
        *(BLOCK, STEP, ("write_model", "numpy", (3,), "halve"), ("write_model", "other address", (4, 5), "limit")),
        *(BLOCK, STEP),
    ],
    "masters, uncounted, and another that is counted": [
        *(BLOCK, STEP, ("write_masters", "data", (1,), "halve"), BLOCK, ("write_masters", "no_grad", (3,), "fill")),
        STEP,
    ],
    "masters in one memory, then one in place": [
        *(BLOCK, STEP, ("write_masters", "vector", (1, 2, 4, 5), "halve"), BLOCK, STEP),
        *(("write_masters", "no_grad", (3, 5), "negate"), BLOCK, STEP),
    ],
    "masters, uncounted, then the model at another address": [
        *(BLOCK, STEP, ("write_masters", "numpy", (1,), "fill"), ("write_model", "vector", (1, 2), "halve"), BLOCK),
        *(STEP, BLOCK, STEP),
    ],
    "masters, uncounted, then the model at another address before the first block": [
        *(("write_masters", "numpy", (1,), "fill"), ("write_model", "vector", (0, 1, 2, 4, 5), "halve"), BLOCK, STEP),
    ],
    "masters, uncounted, then some elements of the model": [
        *(("write_masters", "numpy", (4, 3), "negate"), ("write_model", "view", (4, 3), "fill"), ("save",)),
    ],
    "masters, uncounted, and a load of others": [
        *(BLOCK, STEP, ("write_masters", "data", (2,), "fill"), ("load", (3, 5)), BLOCK, STEP),
    ],
    "masters, uncounted, and a load of others before the first block": [
        *(("write_masters", "data", (2,), "fill"), ("load", (3, 5)), BLOCK, STEP),
    ],
    "masters, uncounted, then the model, uncounted": [
        *(BLOCK, STEP, ("write_masters", "data", (1,), "fill"), ("write_model", "data", (1,), "halve"), BLOCK, STEP),
    ],
    "masters, uncounted, then the model, uncounted, before the first block": [
        *(("write_masters", "data", (1,), "fill"), ("write_model", "data", (1,), "halve"), BLOCK, STEP),
    ],
    "masters, then the model, uncounted": [
        *(BLOCK, STEP, ("write_masters", "no_grad", (1,), "fill"), ("write_model", "data", (1,), "halve"), BLOCK, STEP),
    ],
    "the model, uncounted, then masters": [
        *(BLOCK, STEP, ("write_model", "data", (1,), "halve"), ("write_masters", "no_grad", (1,), "fill"), BLOCK, STEP),
    ],
    "the model, uncounted, then masters at another address": [
        *(BLOCK, ("write_model", "numpy", (1,), "negate"), ("write_masters", "vector", (1, 2, 4, 5), "fill")),
        *(("forward",), STEP, BLOCK, STEP),
    ],
    "masters, and a step without gradients": [
        *(BLOCK, STEP, ("write_masters", "no_grad", (3,), "fill"), STEP, BLOCK, STEP),
    ],
}


# Of which docs/amp.md says that an accelerator does not see them.
UNSEEN_THERE = (
    "masters, uncounted, then the model at another address",
    "masters, then the model, uncounted",
    "the model, uncounted, then masters",
    "the model, uncounted, then masters at another address",
)


def run_found(operations, level, how):
    fuses = how == "fuse_unscale"
    return run(Config(level, "sgd", "fused" if fuses else how, fuses, 16.0, 0.5, 2.0**-4, False, False), operations)


@pytest.mark.pairwise
@pytest.mark.parametrize("how", ["torch", "combine_grad", "fused", "fuse_unscale"])
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("name", [name for name in FOUND if DEVICE.type == "cpu" or name not in UNSEEN_THERE])
def test_found(name, level, how):
    run_found(FOUND[name], level, how)


# What counts before the first step, in which a fused optimizer gives masters other addresses; uncounted on a CPU alone.
BEFORE_THE_STEP = {
    "the model": [BLOCK, ("write_model", "no_grad", (1,), "halve"), STEP],
    "the model at another address": [BLOCK, ("write_model", "vector", (1, 2), "halve"), BLOCK, STEP],
    "the model, uncounted": [BLOCK, ("write_model", "data", (2,), "negate"), BLOCK, STEP],
    "masters": [BLOCK, ("write_masters", "no_grad", (1,), "halve"), BLOCK, STEP],
    "masters at another address": [BLOCK, ("write_masters", "other address", (1,), "halve"), BLOCK, STEP],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("how", ["torch", "combine_grad", "fused", "fuse_unscale"])
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("name", BEFORE_THE_STEP)
def test_what_is_written_between_the_first_block_and_the_first_step_counts(name, level, how):
    said = run_found(BEFORE_THE_STEP[name], level, how)
    is_named = DEVICE.type != "cpu" and "uncounted" in name
    assert ("does not count" in said) if is_named else said is None
