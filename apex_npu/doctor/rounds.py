# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Measurements in turns: one process times all variants in each round, so that other load affects all alike."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

WARM_UP_ROUNDS = 2
# The least time of one measurement; reading the clock would be a large part of shorter ones.
SHORTEST_MS = 4.0

Times = dict[str, list[float]]


def processor() -> str:
    """Return the name of the CPU."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    named = re.search(r"^model name\s*: (.+)$", text, flags=re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def in_turns(
    variants: Sequence[str],
    rounds: int,
    time_one: Callable[[str], float],
    *,
    warm_up: int = WARM_UP_ROUNDS,
    budget_s: float = float("inf"),
    least: int = 7,
) -> Times:
    """Return the milliseconds of ``time_one(variant)`` in each round, per variant.

    Args:
        variants: The names of the variants.
        rounds: The number of rounds that count.
        time_one: A function that measures one variant.
        warm_up: The number of rounds before those that count.
        budget_s: The wall time after which to stop, if ``least`` rounds are done.
        least: The least number of rounds that count.
    """
    times: Times = {variant: [] for variant in variants}
    deadline = time.perf_counter() + budget_s
    for turn in range(rounds + warm_up):
        if turn >= least + warm_up and time.perf_counter() > deadline:
            break
        # Rotated, so that no variant always follows the same one.
        for i in range(len(variants)):
            variant = variants[(turn + i) % len(variants)]
            elapsed = time_one(variant)
            if turn >= warm_up:
                times[variant].append(elapsed)
    return times


class Spread(NamedTuple):
    """A median, and the interval of 95 % of the values."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of two values or more."""
        fortieths = quantiles(values, n=40, method="inclusive")
        return cls(median(values), fortieths[0], fortieths[-1])
