# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random programs under amp are those of plain torch, however gradients wait for the step."""

import grad_ways
import pytest
from amp.random_programs import describe
from amp.test_random_programs import run_found

pytestmark = [
    pytest.mark.device,
    # numpy, in which Triton's interpreter computes, warns of every nan; kernels do not.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning"),
]


def check(seeds):
    found = [text for text in map(describe, seeds) if text is not None]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("way", grad_ways.WAYS)
@pytest.mark.parametrize("first", [0, 5])
def test_programs(first, way, monkeypatch):
    grad_ways.use(monkeypatch, way)
    check(range(first, first + 5))


@pytest.mark.parametrize("way", grad_ways.WAYS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_are_kept(level, way, monkeypatch):
    """As PCGrad keeps them."""
    grad_ways.use(monkeypatch, way)
    run_found("gradients that are kept", level, "fused")


@pytest.mark.sweep
@pytest.mark.parametrize("way", grad_ways.WAYS)
@pytest.mark.parametrize("first", range(10, 110, 25))
def test_more_programs(first, way, monkeypatch):
    grad_ways.use(monkeypatch, way)
    check(range(first, first + 25))
