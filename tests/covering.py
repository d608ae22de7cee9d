# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which cases of a parametrization run every day; the others are marked ``sweep``.

A test that is marked ``pairwise`` has each pair of values in one of them. A case that is a sweep by a mark of its own
covers none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, groupby
from typing import Any

import pytest
from devices import DEVICE

Pair = tuple[tuple[str, int], tuple[str, int]]


def mark_sweeps(items: list[pytest.Item]) -> None:
    """Mark what is left out of each test that is marked ``pairwise``."""
    chosen = [i for i in items if i.get_closest_marker("pairwise") and not i.get_closest_marker("sweep")]
    for _, cases in groupby(chosen, key=lambda item: item.nodeid.partition("[")[0]):
        pairs = {item: _pairs(item) for item in cases}
        kept = covering(pairs)
        for item in pairs.keys() - kept:
            item.add_marker("sweep")


def covering(pairs: dict[Any, set[Pair]]) -> set[Any]:
    """Of the keys so few, if not the fewest, that all pairs are among theirs: by turns the one that has most more."""
    left, kept = set().union(*pairs.values()), set()
    while left:
        most = max(pairs, key=lambda case: len(pairs[case] & left))
        kept.add(most)
        left -= pairs[most]
    return kept


def _pairs(item: Any) -> set[Pair]:
    values = [(name, id(value)) for name, value in sorted(item.callspec.params.items())]
    assert len(values) > 1, f"{item.nodeid}: all of its cases would be sweeps, as one parameter makes no pairs"
    return set(combinations(values, 2))


def by_turns(firsts: Iterable[Any], others: Sequence[tuple[Any, ...]], of: int = 1) -> list[Any]:
    """Each of ``firsts`` with each of ``others``, with ``of`` of these quick, which are others by turns."""
    cases = []
    assert len(others) % of == 0
    for i, first in enumerate(firsts):
        for j, other in enumerate(others):
            name = "-".join(getattr(value, "__name__", str(value)) for value in (first, *other))
            is_quick = (i + j) % (len(others) // of) == 0
            cases.append(pytest.param(first, *other, id=name, marks=[] if is_quick else [pytest.mark.sweep]))
    return cases


def on_one_device(cases: Iterable[Any], device: str = DEVICE.type) -> list[Any]:
    """By turns each of ``cases`` is a sweep on the simulated NPU, or everywhere else."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [[] if i % 2 == (device == "npu") else [pytest.mark.sweep] for i in range(len(cases))]
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]
