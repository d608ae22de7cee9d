# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The formula of benchmarks/ring.py against its simulation, and both against rings worked out manually."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_PATH = Path(__file__).parents[2] / "benchmarks" / "ring.py"
_SPEC = importlib.util.spec_from_file_location("ring", _PATH)
ring = sys.modules["ring"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(ring)

# An even pace, in whatever units.
CASES = {
    "processes": st.integers(2, 12),
    "buckets": st.integers(1, 12),
    "nbytes": st.floats(1.0, 1e3),
    "latency": st.floats(0.0, 2.0),
    "bandwidth": st.floats(1.0, 1e3),
    "backward": st.floats(0.1, 100.0),
}


def test_two_processes_worked_out():
    # A ring of two: two rounds, in each of which half of the 8 bytes passes, at 2 bytes a second and 1 s of latency.
    link = ring.Link(1.0, 2.0)
    assert ring.ring_seconds(8.0, 2, link) == 6.0
    # Two buckets of 4 bytes take 4 s each; they are full at 5 and 10 s. The second is there at 14 s.
    assert ring.exposed_seconds(10.0, 8.0, 2, 2, link) == 4.0
    assert ring.simulate([10.0, 10.0], 8.0, 2, link) == 14.0
    # With backward in 2 s they are full at 1 and 2 s, and there at 5 and 9 s.
    assert ring.exposed_seconds(2.0, 8.0, 2, 2, link) == 7.0
    assert ring.simulate([2.0, 2.0], 8.0, 2, link) == 9.0


@settings(max_examples=200, deadline=None)
@given(**CASES)
def test_formula_and_simulation_agree_where_processes_are_alike(
    processes, buckets, nbytes, latency, bandwidth, backward
):
    link = ring.Link(latency, bandwidth)
    expected = backward + ring.exposed_seconds(backward, nbytes, buckets, processes, link)
    assert ring.simulate([backward] * processes, nbytes, buckets, link) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(**CASES, slower=st.lists(st.floats(1.0, 3.0), min_size=12, max_size=12))
def test_processes_of_several_speeds_are_between_the_formulas_of_the_slowest_and_the_fastest(
    processes, buckets, nbytes, latency, bandwidth, backward, slower
):
    link = ring.Link(latency, bandwidth)
    speeds = [backward * factor for factor in slower[:processes]]
    low, high = (b + ring.exposed_seconds(b, nbytes, buckets, processes, link) for b in (min(speeds), max(speeds)))
    end = ring.simulate(speeds, nbytes, buckets, link)
    assert max(low, max(speeds)) * (1 - 1e-9) <= end <= high * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(**{**CASES, "buckets": st.none(), "latency": st.floats(1e-6, 2.0)})
def test_no_number_of_buckets_waits_less_than_the_best_size(processes, buckets, nbytes, latency, bandwidth, backward):
    link = ring.Link(latency, bandwidth)
    best = ring.best_bucket_nbytes(backward, nbytes, processes, link)
    assert 0.0 < best <= nbytes

    def exposed(buckets):
        return ring.exposed_seconds(backward, nbytes, buckets, processes, link)

    # The formula of a whole number of buckets, continued to the fraction that the best size gives.
    least = exposed(nbytes / best)
    for buckets in (1, 2, 3, 5, 8, 13, 50, 300):
        assert least <= exposed(buckets) * (1 + 1e-9)
