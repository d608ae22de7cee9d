# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Lineage``: which operator has written which bytes, to follow an inf from a gradient to its origin."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from apex_npu.debug.watching.operators import held

Writer = TypeVar("Writer")


def span_of(tensor: Tensor) -> tuple[int, int, bool]:
    """Return the first byte of ``tensor``, the byte after its last, and whether all between belong to elements."""
    size = tensor.element_size()
    count: int = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * size
    return begin, begin + count * size, count == tensor.numel()


class Lineage(Generic[Writer]):
    """The writers of the bytes of each storage.

    A storage is identified by a weak reference, because the address of a freed storage can be used again.
    """

    def __init__(self) -> None:
        """Start with no storage."""
        # The writes of each storage, oldest first: the first byte, the byte after the last, and the writer.
        self._storages: dict[int, tuple[StorageWeakRef, list[tuple[int, int, Writer]]]] = {}
        self._until_swept = 1024

    def write(self, tensor: Tensor, writer: Writer) -> None:
        """Record that ``writer`` has written all of ``tensor``; a tensor whose memory cannot be read has no writers."""
        local = held(tensor)
        if local is None:
            return
        (begin, end, is_dense), reference = span_of(local), StorageWeakRef(local.untyped_storage())
        if reference.cdata not in self._storages:
            self._sweep()
        _, writes = self._storages.setdefault(reference.cdata, (reference, []))
        if is_dense:  # this replaces the writes within
            writes[:] = [write for write in writes if write[0] < begin or end < write[1]]
        writes.append((begin, end, writer))

    def writers(self, tensor: Tensor) -> list[Writer]:
        """Return the known writers of bytes of ``tensor``, oldest first."""
        local = held(tensor)
        if local is None:
            return []
        begin, end, _ = span_of(local)
        return [writer for first, last, writer in self._writes(local) if first < end and begin < last]

    def forget(self, tensor: Tensor) -> None:
        """Remove the writers of ``tensor``, because an operator that is not watched has written to it."""
        local = held(tensor)
        if local is not None:
            begin, end, _ = span_of(local)
            writes = self._writes(local)
            writes[:] = [write for write in writes if end <= write[0] or write[1] <= begin]

    def _writes(self, local: Tensor) -> list[tuple[int, int, Writer]]:
        known = self._storages.get(local.untyped_storage()._cdata)
        return [] if known is None else known[1]

    def _sweep(self) -> None:
        self._until_swept -= 1
        if not self._until_swept:
            self._storages = {key: known for key, known in self._storages.items() if not known[0].expired()}
            self._until_swept = max(1024, len(self._storages))
