# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Lineage``: which operator has written which bytes, to follow an inf from a gradient to its origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Writer = TypeVar("Writer")


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


class Lineage(Generic[Writer]):
    """The writers of the bytes of each storage.

    A storage is identified by a weak reference, because the address of a freed storage can be used again.
    """

    def __init__(self) -> None:
        """Start with no storage."""
        self._storages: dict[int, tuple[StorageWeakRef, list[tuple[Span, Writer]]]] = {}
        self._until_swept = 1024

    def write(self, tensor: Tensor, writer: Writer) -> None:
        """Record that ``writer`` has written all of ``tensor``."""
        span, reference = span_of(tensor), StorageWeakRef(tensor.untyped_storage())
        known = self._storages.get(reference.cdata)
        if known is None:
            self._sweep()
            self._storages[reference.cdata] = (reference, [(span, writer)])
            return
        spans = known[1]
        if span.dense:
            spans[:] = [(other, w) for other, w in spans if other not in span]
        spans.append((span, writer))

    def writers(self, tensor: Tensor) -> list[tuple[Span, Writer]]:
        """Return the known writers of bytes of ``tensor``, oldest first, each with the bytes that it wrote."""
        known = self._storages.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        if known is None:
            return []
        span = span_of(tensor)
        return [(other, writer) for other, writer in known[1] if other.overlaps(span)]

    def forget(self, tensor: Tensor) -> None:
        """Remove the writers of ``tensor``, because an operator that is not watched has written to it."""
        known = self._storages.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        if known is not None:
            span = span_of(tensor)
            known[1][:] = [(other, writer) for other, writer in known[1] if not other.overlaps(span)]

    def _sweep(self) -> None:
        self._until_swept -= 1
        if not self._until_swept:
            self._storages = {key: known for key, known in self._storages.items() if not known[0].expired()}
            self._until_swept = max(1024, len(self._storages))
