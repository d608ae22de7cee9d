# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Lineage``: which operator has written which bytes, to follow an inf from a gradient to its origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from apex_npu.debug.watching.operators import held

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
        """Record that ``writer`` has written all of ``tensor``; a tensor whose memory cannot be read has no writers."""
        local = held(tensor)
        if local is None:
            return
        span, reference = span_of(local), StorageWeakRef(local.untyped_storage())
        if reference.cdata not in self._storages:
            self._sweep()
        _, spans = self._storages.setdefault(reference.cdata, (reference, []))
        if span.dense:
            spans[:] = [(other, w) for other, w in spans if other not in span]
        spans.append((span, writer))

    def writers(self, tensor: Tensor) -> list[Writer]:
        """Return the known writers of bytes of ``tensor``, oldest first."""
        local = held(tensor)
        if local is None:
            return []
        span, spans = span_of(local), self._spans(local)
        return [writer for other, writer in spans if other.overlaps(span)]

    def forget(self, tensor: Tensor) -> None:
        """Remove the writers of ``tensor``, because an operator that is not watched has written to it."""
        local = held(tensor)
        if local is not None:
            span, spans = span_of(local), self._spans(local)
            spans[:] = [(other, writer) for other, writer in spans if not other.overlaps(span)]

    def _spans(self, local: Tensor) -> list[tuple[Span, Writer]]:
        known = self._storages.get(local.untyped_storage()._cdata)
        return [] if known is None else known[1]

    def _sweep(self) -> None:
        self._until_swept -= 1
        if not self._until_swept:
            self._storages = {key: known for key, known in self._storages.items() if not known[0].expired()}
            self._until_swept = max(1024, len(self._storages))
