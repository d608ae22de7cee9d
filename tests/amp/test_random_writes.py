# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random programs that write weights, masters, gradients and buffers; see ``random_writes.py``.

    PYTHONPATH=tests python -m amp.random_writes --programs 1000

runs more of them than the tests do, with ``--first-seed`` others.
"""

import pytest
from amp.random_writes import LEVELS, WRITES, describe
from small_programs import WITH_MASTERS, known_fault

QUICK, MORE = 20, 200  # of each kind of write: 100 and 1,000 of a level
# What is apart in silence, at the levels with masters.
LOST = {
    "gradients": "gradients of a backward before the block, and those assigned to the model, are dropped",
    "all": "the same",
}


def check(seeds, level, writes):
    first = next(filter(None, (describe(seed, level, writes) for seed in seeds)), None)
    assert first is None, first


def cases():
    for level in LEVELS:
        for writes in (*WRITES, "all"):
            yield pytest.param(
                level, writes, marks=[known_fault(LOST[writes])] if writes in LOST and level in WITH_MASTERS else []
            )


programs = pytest.mark.parametrize(("level", "writes"), list(cases()))


@programs
def test_programs(level, writes):
    check(range(QUICK), level, writes)


@pytest.mark.sweep
@programs
def test_more_programs(level, writes):
    check(range(QUICK, QUICK + MORE), level, writes)
