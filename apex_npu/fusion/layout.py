# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The layout of flat buffers: integers only, no tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGN_NUMEL = 16
PAD_NUMEL = 32


class Slot(NamedTuple):
    """The place of one storage in a flat buffer.

    Attributes:
        offset_numel: The number of elements before the slot.
        numel: The number of elements of the storage.
    """

    offset_numel: int
    numel: int


@dataclass(frozen=True)
class Layout:
    """Slots in order, and the slot of each tensor.

    Attributes:
        slots: The slots, one per distinct storage, in order of first appearance.
        slot_of: For each tensor the index of its slot; tensors that share a storage share a slot.
        total_numel: The number of elements of the whole buffer.
    """

    slots: tuple[Slot, ...]
    slot_of: tuple[int, ...]
    total_numel: int


def padded_numel(numel: int) -> int:
    """Return the elements that a storage of ``numel`` takes up: rounded up to ``ALIGN_NUMEL``, plus ``PAD_NUMEL``.

    Ascend's vector kernels may read a whole block past the last element.
    """
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL + PAD_NUMEL


def plan_slots(storage_numels: Sequence[int], storage_ids: Sequence[Hashable]) -> Layout:
    """Assign consecutive slots to all distinct storages.

    Args:
        storage_numels: For each tensor, the number of elements of its storage.
        storage_ids: For each tensor, the identity of its storage.

    Raises:
        ValueError: One storage is given two sizes.
    """
    slots: list[Slot] = []
    index_of: dict[Hashable, int] = {}
    slot_of: list[int] = []
    total_numel = 0
    for numel, storage_id in zip(storage_numels, storage_ids, strict=True):
        index = index_of.setdefault(storage_id, len(slots))
        if index == len(slots):
            slots.append(Slot(total_numel, numel))
            total_numel += padded_numel(numel)
        elif slots[index].numel != numel:
            raise ValueError(f"storage {storage_id!r} was given two sizes: {slots[index].numel} and {numel} elements")
        slot_of.append(index)
    return Layout(tuple(slots), tuple(slot_of), total_numel)


def extent_numel(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first to its last, both included; 0 for an empty tensor."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def overlapping(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indices of ranges [begin, end) to leave out so that no two of the others overlap."""
    order = sorted(range(len(spans)), key=lambda i: spans[i][0])  # stable: the first of two equal begins is kept
    found = []
    taken_to: int | None = None
    for i in order:
        begin, end = spans[i]
        if begin == end:
            continue
        if taken_to is not None and begin < taken_to:
            found.append(i)
        else:
            taken_to = end
    return sorted(found)


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if the elements fill their extent without gap or overlap, in any order (such as channels_last)."""
    if 0 in size:
        return True
    expected = 1
    for n, s in zip(reversed(size), reversed(stride), strict=True):  # contiguous, as nearly all are
        if s != expected and n != 1:
            break
        expected *= n
    else:
        return True
    expected = 1
    for n, s in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n != 1), key=lambda dim: dim[1]):
        if s != expected:
            return False
        expected *= n
    return True


def gaps_between(offsets: Sequence[int], numels: Sequence[int]) -> list[int]:
    """Return the number of elements between each range (its first element, its length) and the next; 0 for the last."""
    ends = [offset + numel for offset, numel in zip(offsets, numels, strict=True)]
    return [begin - end for begin, end in zip([*offsets[1:], ends[-1]], ends, strict=True)]
