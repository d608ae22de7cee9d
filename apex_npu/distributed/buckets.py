# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The division of gradients into buckets that are reduced together: integers only, no tensors.

A row of slots is cut into buckets, ranges of neighbours. Backward reaches the last slots first, so the row is cut from
its end, and the bucket at the end is sent first.
"""

from __future__ import annotations

from collections.abc import Sequence

# Smaller collectives are dominated by latency: on links of 100 Gbit/s, 1 MiB takes as long to send as to start.
MIN_BUCKET_NBYTES = 2**20
# Nothing is computed while the last bucket is sent, so it must not be large.
MAX_BUCKET_NBYTES = 32 * 2**20


def bucket_nbytes(total_nbytes: int, count: int, floor_nbytes: int, cap_nbytes: int) -> int:
    """Return the size of a bucket for a request of ``count`` buckets; floor and cap take precedence over the count."""
    return min(max(-(-total_nbytes // count), floor_nbytes, 1), cap_nbytes)


def plan_buckets(slot_nbytes: Sequence[int], target_nbytes: int) -> list[range]:
    """Cut slots into ranges of at least ``target_nbytes`` each, except for the last, which has the remainder.

    Args:
        slot_nbytes: The size of each slot, in the order of memory.
        target_nbytes: The size from which on a bucket is closed.

    Returns:
        Ranges of slots, the end of the row first. Every slot is in one of them.
    """
    buckets = []
    end, size = len(slot_nbytes), 0
    for first in reversed(range(len(slot_nbytes))):
        size += slot_nbytes[first]
        if size >= target_nbytes or first == 0:
            buckets.append(range(first, end))
            end, size = first, 0
    return buckets


def order_of_completion(buckets: Sequence[Sequence[int]], arrival: Sequence[int]) -> list[int]:
    """Return the indices of ``buckets`` in the order in which they are complete.

    Args:
        buckets: The slots of each bucket.
        arrival: For each slot the place of its gradient in the order of arrival; equal for gradients that never came.
    """
    return sorted(range(len(buckets)), key=lambda b: (max(arrival[i] for i in buckets[b]), b))


def waits_little(buckets: Sequence[Sequence[int]], slot_nbytes: Sequence[int], arrival: Sequence[int]) -> bool:
    """Return True if no bucket waits while more bytes than the largest bucket arrive for buckets after it.

    Args:
        buckets: The slots of each bucket, in the order in which buckets are to be sent.
        slot_nbytes: The size of each slot.
        arrival: For each slot the place of its gradient in the order of arrival; all are different.
    """
    arrived_nbytes = [0] * len(arrival)
    total = 0
    for slot in sorted(range(len(arrival)), key=arrival.__getitem__):
        total += slot_nbytes[slot]
        arrived_nbytes[slot] = total
    sizes = [sum(slot_nbytes[i] for i in bucket) for bucket in buckets]
    sent = 0
    for bucket, size in zip(buckets, sizes, strict=True):
        sent += size
        if max(arrived_nbytes[i] for i in bucket) - sent > max(sizes):
            return False
    return True
