# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Lineage``: which operator has written which bytes, to follow an inf from a gradient to its origin."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from apex_npu.debug.watching.operators import held

Writer = TypeVar("Writer")


class _Write(NamedTuple):
    """A write of the bytes from ``begin`` to before ``end``; ``order`` counts the writes of the storage."""

    begin: int
    end: int
    order: int
    writer: Any


class _Writes:
    """The writes of one storage.

    Each list has the writes of ranges with lengths below ``2**n`` and not below ``2**(n - 1)``, in order, so that a
    binary search finds those near a range, also if an earlier write covers the whole storage.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[_Write]] = {}
        self._count = 0

    def add(self, begin: int, end: int, dense: bool, writer: Any) -> None:
        """Add a write, which replaces the writes within its range if every byte of this belongs to an element."""
        if dense:
            for writes in self._lists.values():
                near = _between(writes, begin, end)
                writes[near] = [write for write in writes[near] if write.end > end]
        insort(self._lists.setdefault((end - begin).bit_length(), []), _Write(begin, end, self._count, writer))
        self._count += 1

    def overlapping(self, begin: int, end: int) -> list[Any]:
        """Return the writers of bytes of a range, oldest first."""
        found = [write for writes, near in self._near(begin, end) for write in writes[near] if write.end > begin]
        return [write.writer for write in sorted(found, key=attrgetter("order"))]

    def forget(self, begin: int, end: int) -> None:
        """Remove the writes of bytes of a range."""
        for writes, near in self._near(begin, end):
            writes[near] = [write for write in writes[near] if write.end <= begin]

    def _near(self, begin: int, end: int) -> Iterator[tuple[list[_Write], slice]]:
        """Yield each list with the slice in which writes may overlap a range."""
        for n, writes in self._lists.items():
            yield writes, _between(writes, begin - 2**n, end)


def _between(writes: list[_Write], begin: int, end: int) -> slice:
    """Return the slice of ``writes`` that begin at ``begin`` or later, and before ``end``."""
    # A shorter tuple comes before all that it is the beginning of.
    return slice(bisect_left(writes, (begin,)), bisect_left(writes, (end,)))


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of ``tensor``, which is strided and has elements, and the byte after its last."""
    size = tensor.element_size()
    last: int = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * size
    return begin, begin + (last + 1) * size


class Lineage(Generic[Writer]):
    """The writers of the bytes of each storage.

    A storage is identified by a weak reference, because the address of a freed storage can be used again.
    """

    def __init__(self) -> None:
        """Start with no storage."""
        self._storages: dict[int, tuple[StorageWeakRef, _Writes]] = {}
        self._until_swept = 1024

    def write(self, tensor: Tensor, writer: Writer) -> None:
        """Record that ``writer`` has written all of ``tensor``; a tensor whose memory cannot be read has no writers."""
        local = held(tensor)
        if local is None:
            return
        reference = StorageWeakRef(local.untyped_storage())
        if reference.cdata not in self._storages:
            self._sweep()
        _, writes = self._storages.setdefault(reference.cdata, (reference, _Writes()))
        begin, end = _range_of(local)
        writes.add(begin, end, end - begin == local.nbytes, writer)

    def writers(self, tensor: Tensor) -> list[Writer]:
        """Return the known writers of bytes of ``tensor``, oldest first."""
        local = held(tensor)
        return [] if local is None else self._writes(local).overlapping(*_range_of(local))

    def forget(self, tensor: Tensor) -> None:
        """Remove the writers of ``tensor``, because an operator that is not watched has written to it."""
        local = held(tensor)
        if local is not None:
            self._writes(local).forget(*_range_of(local))

    def _writes(self, local: Tensor) -> _Writes:
        known = self._storages.get(local.untyped_storage()._cdata)
        return _Writes() if known is None else known[1]

    def _sweep(self) -> None:
        self._until_swept -= 1
        if not self._until_swept:
            self._storages = {key: known for key, known in self._storages.items() if not known[0].expired()}
            self._until_swept = max(1024, len(self._storages))
