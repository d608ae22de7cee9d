# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How long communication continues after backward: a formula for rings of any size, and a simulation to check it.

Backward takes ``backward`` seconds and gives ``nbytes`` of gradients at an even pace, cut into ``buckets`` of one size.
Each is averaged by a ring all-reduce, one after the other: 2 (P − 1) rounds, in each of which every process sends a
part, 1/P of the bucket, to its neighbour. A round takes the link's latency and the time of those bytes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """From one process to the next.

    Attributes:
        latency: Seconds until the first byte is there, the start of a round included.
        bandwidth: Bytes per second.
    """

    latency: float
    bandwidth: float


def ring_seconds(nbytes: float, processes: int, link: Link) -> float:
    """One all-reduce."""
    return 2 * (processes - 1) * (link.latency + nbytes / processes / link.bandwidth)


def exposed_seconds(backward: float, nbytes: float, buckets: int, processes: int, link: Link) -> float:
    """What a step waits for averages once backward has ended.

    Either the link keeps up, and the last bucket alone is left; or it is busy from the first full bucket on.
    """
    ring = ring_seconds(nbytes / buckets, processes, link)
    return max(ring, backward / buckets + buckets * ring - backward)


def best_bucket_nbytes(backward: float, nbytes: float, processes: int, link: Link) -> float:
    """The bucket size with which a step waits least.

    While the link is busy, waiting for the first bucket (S / N of backward) is traded against N / S times the latency
    of a ring: S = N · sqrt(2 (P − 1) latency / backward). No bucket need be larger than that with which the link just
    keeps up: there both terms of ``exposed_seconds`` are equal, and from there on it is the last bucket that counts.
    """
    latency = 2 * (processes - 1) * link.latency
    transfer = 2 * (processes - 1) / processes / link.bandwidth  # seconds for a byte
    keeps_up = math.inf
    if backward > nbytes * transfer:
        # S with latency + S · transfer = backward · S / N: from there on a ring takes no longer than filling a bucket.
        keeps_up = latency / (backward / nbytes - transfer)
    busy = nbytes * math.sqrt(latency / backward)
    return min(nbytes, keeps_up, busy)


def simulate(backwards: Sequence[float], nbytes: float, buckets: int, link: Link) -> float:
    """The same by events, one process of the ring for each of ``backwards``.

    Returns:
        When the last process has all averages, in seconds from the start of backward.
    """
    processes, rounds = len(backwards), 2 * (len(backwards) - 1)
    wire = nbytes / buckets / processes / link.bandwidth
    bucket = [-1] * processes  # that each process averages now
    heard = [0] * processes  # rounds of it that have come from the left
    early: list[set[tuple[int, int]]] = [set() for _ in backwards]  # messages for buckets that it has not begun
    free = [0.0] * processes  # when its link to the right is
    events = [(0.0, rank, 0, -1) for rank in range(processes)]  # time, to whom, bucket, round; -1: the last one is done
    end = 0.0

    def send(now: float, rank: int, number: int, turn: int) -> None:
        start = max(now, free[rank])
        free[rank] = start + wire
        heapq.heappush(events, (start + wire + link.latency, (rank + 1) % processes, number, turn))

    while events:
        now, rank, number, turn = heapq.heappop(events)
        if turn < 0:
            full = (number + 1) / buckets * backwards[rank]
            if now < full:
                heapq.heappush(events, (full, rank, number, -1))
                continue
            bucket[rank], heard[rank] = number, 0
            send(now, rank, number, 0)
        elif number != bucket[rank]:
            early[rank].add((number, turn))
            continue
        else:
            heard[rank] += 1
            if heard[rank] < rounds:
                send(now, rank, number, heard[rank])
        while (number, heard[rank]) in early[rank]:  # what was waiting for this process
            early[rank].remove((number, heard[rank]))
            heard[rank] += 1
            if heard[rank] < rounds:
                send(now, rank, number, heard[rank])
        if heard[rank] == rounds:
            end = max(end, now)
            if number + 1 < buckets:
                heapq.heappush(events, (now, rank, number + 1, -1))
    return end
