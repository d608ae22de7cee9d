# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The formulas of ring.py: messages of a ring that is played, collectives and memory of a small model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import processes
import pytest
import ring
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
STUDIES = Path(__file__).parent


class Ring:
    """Ranks that hold chunks of a tensor, one number each, and pass one on at a time.

    Attributes:
        sent: Chunks that each rank has sent.
    """

    def __init__(self, values: list[list[int]]) -> None:
        self.values, self.sent = values, 0

    def turn(self, first: int, *, add: bool) -> None:
        """All ranks send at once; rank r its chunk r + ``first``, then what it has got."""
        count = len(self.values)
        for step in range(count - 1):
            messages = [(rank, (rank + first - step) % count) for rank in range(count)]
            passed = [self.values[rank][chunk] for rank, chunk in messages]
            for (rank, chunk), value in zip(messages, passed, strict=True):
                to = self.values[(rank + 1) % count]
                to[chunk] = to[chunk] + value if add else value
            self.sent += 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_bytes_and_hops_are_those_of_a_ring(ranks):
    values = [[7**rank + chunk for chunk in range(ranks)] for rank in range(ranks)]
    sums = [sum(column) for column in zip(*values, strict=True)]
    played = Ring(values)
    played.turn(0, add=True)
    assert [values[rank][(rank + 1) % ranks] for rank in range(ranks)] == [sums[(r + 1) % ranks] for r in range(ranks)]
    chunk_nbytes = 12
    for kind in ("reduce_scatter", "all_gather", "all_reduce"):
        collective = ring.Collectives(kind, ranks, chunk_nbytes * ranks, calls=1, rings=0)
        if kind == "all_gather":
            played.sent = 0
            played.turn(1, add=False)
            assert values == [sums] * ranks
        if kind == "all_reduce":
            played.sent *= 2  # a reduce-scatter and an all-gather
        assert collective.hops() == played.sent
        assert collective.sent() == pytest.approx(played.sent * chunk_nbytes)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_collectives_and_memory_are_those_of_the_formulas():
    path = os.pathsep.join([processes.PYTHONPATH, str(STUDIES)])
    processes.run(STUDIES / "ring_worker.py", *ring.ENGINES, processes=1, PYTHONPATH=path)


def test_a_link_within_a_node_and_cards_between_nodes():
    """Times by hand: 8 GB, one call."""
    cluster = ring.Cluster(16, node=8, within=100e9, between=40e9, latency=1e-3)

    def of(*args):
        return ring.Collectives(*args).seconds(cluster)

    assert of("all_gather", 8, 8e9, 1, 0) == pytest.approx(7e9 / 100e9 + 7e-3)
    assert of("all_reduce", 16, 8e9, 1, 1) == pytest.approx(15e9 / 40e9 + 30e-3)
    # Eight rings of two ranks share the cards.
    assert of("all_reduce", 2, 1e9, 3, 8) == pytest.approx(8 * 1e9 / 40e9 + 6e-3)
    fast = ring.Cluster(16, node=8, within=100e9, between=400e9, latency=0.0)
    assert ring.Collectives("reduce_scatter", 16, 8e9, 1, 1).seconds(fast) == pytest.approx(7.5e9 / 100e9)


def test_the_documentation_shows_what_it_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ring.py"])
    ring.main()
    text = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    lines = capsys.readouterr().out.splitlines()
    shown = text.partition(lines[0])[2].partition("\n\n")[0].splitlines()[1:]
    assert shown[0] == lines[1]
    assert len(shown) > 8
    assert set(shown[1:]) <= set(lines[2:])
