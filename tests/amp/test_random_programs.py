# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random programs under amp, compared with plain torch after each operation; see ``random_programs.py``.

    PYTHONPATH=tests python -m amp.random_programs --programs 2000

runs more of them than the tests do, with ``--first-seed`` others.
"""

from pathlib import Path

import processes
import pytest
import torch.distributed as dist
from amp.random_programs import PARAMS, WITH_MASTERS, Config, describe, run

from apex_npu._extension import extension

QUICK, SLOW = 50, 300


def check(seeds):
    found = [text for text in map(describe, seeds) if text is not None]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("first", range(0, QUICK, 10))
def test_programs(first):
    check(range(first, first + 10))


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(QUICK, QUICK + SLOW, 50))
def test_more_programs(first):
    check(range(first, first + 50))


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_programs_of_two_processes():
    processes.run(Path(__file__).with_name("random_programs.py"), "--programs", "30")


# Programs that have differed.

ALL = tuple(range(PARAMS))
EACH = (ALL, ALL)


def block(which=(0,), factor=32.0, reached=EACH, delay=None, fail=None, loss_id=0):
    return ("block", which, loss_id, factor, reached, delay, None, fail)


ONE, INF = block(), block(factor=float("inf"))
FIRST = block(reached=((0,), ALL))  # which reaches the first parameter alone
CLEAR = ("model_zero_grad", 0, True)
DELAYED = block(delay="delay_unscale")
UNREACHED = block(delay="delay_unscale", reached=((0,), ALL))
UNCHECKED_INF = block(factor=float("inf"), delay="delay_overflow_check", reached=((0, 1), ALL))
STEP, ZERO = ("step", 0), ("model_zero_grad", 0, False)
FOUND = {
    "a step before the first block": [("edit_weight", 0, 1, 3.0), STEP],
    "cleared after delay_unscale": [ONE, DELAYED, ("model_zero_grad", 0, True), ONE, STEP],
    "zeroed after delay_unscale, and again after the step": [
        DELAYED,
        ("zero_grad", 0, False),
        STEP,
        ("zero_grad", 0, False),
        block(reached=((0, 1), ALL)),
    ],
    "one cleared after delay_unscale": [ONE, DELAYED, ("drop", 0, 1), ONE, STEP],
    "zeroed after delay_unscale": [ONE, DELAYED, ("zero", 0, 1), ONE, STEP],
    "zeroed after delay_unscale, and not reached": [DELAYED, ZERO, block(reached=((0, 1), ALL)), STEP, STEP],
    "not reached with delay_unscale": [ONE, block(delay="delay_unscale", reached=((0, 4), ALL)), ONE, STEP],
    "an exception after delay_unscale": [DELAYED, block(fail="before"), ONE, STEP],
    "an exception after delay_unscale and backward": [ONE, DELAYED, block(fail="after"), ONE, STEP],
    "a step after delay_unscale": [DELAYED, STEP],
    "a step after delay_unscale and an overflow": [INF, DELAYED, STEP],
    "a step after delay_unscale and an exception": [DELAYED, block(fail="before"), STEP],
    "cleared to zeros after delay_unscale": [DELAYED, ("zero_grad", 0, False), STEP],
    "an overflow under delay_overflow_check": [UNCHECKED_INF, ONE, STEP],
    "an overflow under delay_overflow_check, and a block of the other": [UNCHECKED_INF, block((1,)), ONE, STEP],
    "an overflow in a block that fails": [block(factor=float("inf"), fail="after"), ONE, STEP],
    "an overflow in a block that fails, cleared": [
        block(factor=float("inf"), fail="after"),
        ("zero_grad", 0, True),
        ONE,
        STEP,
    ],
    "an overflow under delay_unscale, and an exception": [
        block(factor=float("inf"), delay="delay_unscale"),
        *(block(fail="before"), ONE, STEP),
    ],
    "an overflow under delay_unscale, and an exception after backward": [
        block(factor=float("inf"), delay="delay_unscale"),
        *(block(fail="after"), ONE, STEP),
    ],
    "an overflow under delay_unscale, and a block of both": [
        block(factor=float("inf"), delay="delay_unscale"),
        *(block((0, 1)), STEP, ("step", 1), ("observe",)),
    ],
    "an overflow, and another block": [INF, ONE, STEP, ("observe",)],
    "an overflow under both delays": [UNCHECKED_INF, DELAYED, ONE, STEP],
    "the norm of what is left": [ONE, ("drop", 0, 1), ("clip", 0, "fused", 2.0, False), STEP],
    "zeroed in a block that fails": [ONE, ("block", (0,), 0, 1.0, EACH, None, False, "before"), ("drop", 0, 1), STEP],
    "the norm of nothing": [ONE, ("model_zero_grad", 0, True), ("clip", 0, "fused", 2.0, True), STEP],
    "an overflow cleared before another's block": [INF, ("model_zero_grad", 0, True), block((1,)), STEP, ("observe",)],
    "zeros are a gradient": [ONE, STEP, ("zero_grad", 0, True), ONE, ("model_zero_grad", 0, False), STEP],
    "zeroed, and once more after a step": [ONE, ZERO, STEP, ZERO, STEP, STEP],
    "zeroed before a block that fails": [ONE, ("zero_grad", 0, False), block(fail="after"), STEP, STEP],
    "zeroed before a block that does not reach it": [ONE, ZERO, block(reached=((0, 1), ALL)), STEP, STEP],
    "zeroed after an overflow, before a block that fails": [INF, block(fail="after"), ("zero", 0, 3), STEP, STEP],
    "all of the model cleared after delay_unscale": [ONE, DELAYED, ZERO, ONE, STEP],
    "one that delay_unscale does not reach cleared": [
        ONE,
        block(delay="delay_unscale", reached=((0,), ALL)),
        ZERO,
        ONE,
        STEP,
    ],
    "zeroed after delay_unscale where it has not reached": [ONE, UNREACHED, ("zero_grad", 0, False), STEP],
    "one dropped, the others zeroed after delay_unscale": [
        ONE,
        DELAYED,
        ("freeze", 0, 0, True),
        ("zero_grad", 0, False),
        STEP,
    ],
    "clipped, and another block": [ONE, ("clip", 0, "fused", float("inf"), True), ONE, STEP],
    "taken out of all groups and saved": [ONE, STEP, ("regroup", 0, ((3,), (5,))), ("save",)],
    "what was dropped is not zeroed": [ONE, ("model_zero_grad", 0, True), ("zero_grad", 0, False), STEP],
    "one dropped": [ONE, ("drop", 0, 1), STEP],
    "cleared": [ONE, CLEAR, STEP],
    "cleared, and not reached again": [ONE, CLEAR, FIRST, STEP],
    "cleared within an accumulation": [ONE, FIRST, CLEAR, FIRST, STEP],
    "cleared after a block that fails": [ONE, block(fail="after"), CLEAR, STEP, FIRST, STEP],
    "zeroed, with blocks that do not reach all": [ONE, STEP, ZERO, FIRST, STEP, FIRST, STEP, CLEAR, FIRST, STEP],
    "cleared in a block that fails": [("block", (0,), 0, 1.0, EACH, None, True, "after"), STEP],
    "an overflow cleared": [INF, CLEAR, ONE, STEP],
    "an overflow, another block, and clipped": [INF, ONE, ("clip", 0, "fused", 2.0, True), STEP, ("observe",)],
    "a norm of inf, and all cleared": [ONE, ("put_inf", 0, 1), ("clip", 0, "fused", 2.0, True), CLEAR, ONE, STEP],
    "an overflow cleared, and nothing stepped": [INF, CLEAR, STEP, ("observe",)],
    "an overflow cleared after a block that fails": [INF, block(fail="before"), CLEAR, ONE, STEP],
    "gradients that are kept": [
        *(ONE, STEP, ("zero_grad", 0, True)),
        *(ONE, ("keep", 0, 1), ("zero_grad", 0, True)) * 2,
        FIRST,
    ],
}


def run_found(name, level, how, scale="dynamic"):
    fuses = how == "fuse_unscale"
    groups = ((ALL[:3], ALL[3:]),) * 2
    run(Config(level, "sgd", "fused" if fuses else how, fuses, scale, 0.5, 2.0**-4, False, groups), FOUND[name])


@pytest.mark.pairwise
@pytest.mark.parametrize("scale", ["dynamic", 1.0])
@pytest.mark.parametrize("how", ["torch", "combine_grad", "fused", "fuse_unscale", "remainders"])
@pytest.mark.parametrize("level", ["O1", *WITH_MASTERS])
@pytest.mark.parametrize("name", FOUND)
def test_found(name, level, how, scale):
    if how == "remainders" and (level not in WITH_MASTERS or extension is None):
        how = "fused"
    run_found(name, level, how, scale)


def test_the_norm_that_torch_takes_is_of_what_is_left():
    for level in ("O1", *WITH_MASTERS):
        config = Config(level, "sgd", "torch", False, 16.0, 0.5, 2.0**-4, False, ((ALL,), (ALL,)))
        run(config, [ONE, ("drop", 0, 1), ("clip", 0, "torch", 2.0, False), STEP])
