# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Lineage``: which operator has written which bytes, to follow an inf from a gradient to its origin."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from apex_npu.debug.watching.operators import held

Writer = TypeVar("Writer")
_BEGIN = attrgetter("begin")


@dataclass(frozen=True)
class Span:
    """A range of bytes in a storage.

    Attributes:
        begin: The first byte.
        end: The byte after the last.
        dense: Whether every byte belongs to an element.
    """

    begin: int
    end: int
    dense: bool

    def __contains__(self, other: Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end

    def overlaps(self, other: Span) -> bool:
        """Return whether the ranges have bytes in common."""
        return self.begin < other.end and other.begin < self.end


def span_of(tensor: Tensor) -> Span:
    """Return the bytes of ``tensor``, which is strided and has elements."""
    size = tensor.element_size()
    count: int = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * size
    return Span(begin, begin + count * size, count == tensor.numel())


@dataclass(frozen=True)
class _Write(Generic[Writer]):
    """A write of a span of a storage, and the number of writes of the storage before it."""

    span: Span
    order: int
    writer: Writer

    @property
    def begin(self) -> int:
        """The first byte."""
        return self.span.begin


class _Writes(Generic[Writer]):
    """The writes of one storage.

    Each list has the writes of spans with lengths below ``2**n`` and not below ``2**(n - 1)``, by their begin, so that
    a binary search finds those near a span, also if an earlier write covers the whole storage.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[_Write[Writer]]] = {}
        self._count = 0

    def add(self, span: Span, writer: Writer) -> None:
        """Add a write, which replaces the writes within ``span`` if that is dense."""
        if span.dense:
            for writes in self._lists.values():
                near = _between(writes, span.begin, span.end)
                writes[near] = [write for write in writes[near] if write.span not in span]
        writes = self._lists.setdefault((span.end - span.begin).bit_length(), [])
        insort(writes, _Write(span, self._count, writer), key=_BEGIN)
        self._count += 1

    def overlapping(self, span: Span) -> list[Writer]:
        """Return the writers of bytes of ``span``, oldest first."""
        found = [write for writes, near in self._near(span) for write in writes[near] if write.span.overlaps(span)]
        return [write.writer for write in sorted(found, key=lambda write: write.order)]

    def forget(self, span: Span) -> None:
        """Remove the writes of bytes of ``span``."""
        for writes, near in self._near(span):
            writes[near] = [write for write in writes[near] if not write.span.overlaps(span)]

    def _near(self, span: Span) -> Iterator[tuple[list[_Write[Writer]], slice]]:
        """Yield each list with the slice in which writes may overlap ``span``."""
        for n, writes in self._lists.items():
            yield writes, _between(writes, span.begin - 2**n, span.end)


def _between(writes: Sequence[_Write[Writer]], begin: int, end: int) -> slice:
    """Return the slice of sorted ``writes`` that begin at ``begin`` or later, and before ``end``."""
    return slice(bisect_left(writes, begin, key=_BEGIN), bisect_left(writes, end, key=_BEGIN))


class Lineage(Generic[Writer]):
    """The writers of the bytes of each storage.

    A storage is identified by a weak reference, because the address of a freed storage can be used again.
    """

    def __init__(self) -> None:
        """Start with no storage."""
        self._storages: dict[int, tuple[StorageWeakRef, _Writes[Writer]]] = {}
        self._until_swept = 1024

    def write(self, tensor: Tensor, writer: Writer) -> None:
        """Record that ``writer`` has written all of ``tensor``; a tensor whose memory cannot be read has no writers."""
        local = held(tensor)
        if local is None:
            return
        span, reference = span_of(local), StorageWeakRef(local.untyped_storage())
        if reference.cdata not in self._storages:
            self._sweep()
        _, writes = self._storages.setdefault(reference.cdata, (reference, _Writes()))
        writes.add(span, writer)

    def writers(self, tensor: Tensor) -> list[Writer]:
        """Return the known writers of bytes of ``tensor``, oldest first."""
        local = held(tensor)
        return [] if local is None else self._writes(local).overlapping(span_of(local))

    def forget(self, tensor: Tensor) -> None:
        """Remove the writers of ``tensor``, because an operator that is not watched has written to it."""
        local = held(tensor)
        if local is not None:
            self._writes(local).forget(span_of(local))

    def _writes(self, local: Tensor) -> _Writes[Writer]:
        known = self._storages.get(local.untyped_storage()._cdata)
        return _Writes() if known is None else known[1]

    def _sweep(self) -> None:
        self._until_swept -= 1
        if not self._until_swept:
            self._storages = {key: known for key, known in self._storages.items() if not known[0].expired()}
            self._until_swept = max(1024, len(self._storages))
