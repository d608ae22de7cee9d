# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``pairwise`` leaves of a product, ``by_turns`` of a second list, and ``on_one_device`` of a device's cases."""

from itertools import combinations, product

import pytest
from covering import by_turns, covering, on_one_device


def pairs_of(row):
    return set(combinations(enumerate(row), 2))


@pytest.mark.parametrize("sizes", [(4, 3, 2, 2), (27, 3, 4, 2), (3, 2)])
def test_every_pair_of_values_is_left(sizes):
    rows = list(product(*map(range, sizes)))
    kept = covering({row: pairs_of(row) for row in rows})
    assert set().union(*map(pairs_of, kept)) == set().union(*map(pairs_of, rows))
    widest, second = sorted(sizes, reverse=True)[:2]
    assert widest * second <= len(kept) <= 1.7 * widest * second


def test_what_a_test_skips_covers_nothing():
    rows = {row: pairs_of(row) if row[0] else set() for row in product(range(2), range(3), range(2))}
    assert {row[0] for row in covering(rows)} == {1}


def test_turns():
    cases = by_turns("abc", [(1,), (2,)])
    assert [case.id for case in cases if not case.marks] == ["a-1", "b-2", "c-1"]
    assert len(cases) == 6
    assert len([case for case in by_turns("ab", [(1,), (2,), (3,), (4,)], of=2) if not case.marks]) == 4


def test_every_case_is_left_on_one_device():
    left = {
        device: [case.values for case in on_one_device("abc", device) if not case.marks] for device in ("cpu", "npu")
    }
    assert left == {"cpu": [("a",), ("c",)], "npu": [("b",)]}
    assert [case.values for case in on_one_device([(1, 2), (3, 4)])] == [(1, 2), (3, 4)]
