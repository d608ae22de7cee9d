# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Combined buffers: one tensor over the flat buffers of several groups, which are ranges of one piece of memory.

Groups have memory of their own until a script asks for combined buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from apex_npu.backends import is_capturing
from apex_npu.fusion.flat_buffer import FlatBuffer


class _HasParams(Protocol):
    params: list[Tensor]


_T = TypeVar("_T", bound=_HasParams)


class SharedBuffer:
    """A buffer of which several owners have a range each, allocated when the first of them needs its own."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._buffer: FlatBuffer | None = None

    def part(self, begin: int, numel: int) -> FlatBuffer:
        """The range of one owner."""
        if self._buffer is None:
            self._buffer = FlatBuffer(self._numel, self._dtype, self._device)
        return self._buffer.part(begin, numel)


def are_neighbours(flats: Sequence[Tensor]) -> bool:
    """True where ``flats``, 1-D, follow each other in one storage."""
    storage, end = flats[0].untyped_storage()._cdata, flats[0].storage_offset()
    for flat in flats:
        if flat.untyped_storage()._cdata != storage or flat.storage_offset() != end:
            return False
        end += flat.numel()
    return True


def joined(flats: Iterable[Tensor]) -> Tensor:
    """One tensor over ``flats``, which are neighbours."""
    first, *others = members = list(flats)
    assert are_neighbours(members)
    numel = sum(flat.numel() for flat in members)
    return first.as_strided((numel,), (1,), first.storage_offset()) if others else first


def combined(held: Sequence[_T], leading: Collection[int], memory: Callable[[_T], Tensor]) -> list[list[_T]] | None:
    """What makes up each combined buffer, in order; None where memory has to be laid out otherwise first.

    Args:
        held: Groups of parameters.
        leading: See ``split_by_kind``.
        memory: The flat tensor of a group.
    """
    kinds = split_by_kind([group.params for group in held], leading)
    if sum(map(len, kinds)) != len(held):
        return None  # one has parameters of several kinds
    found = [[held[index] for index, _ in members] for members in kinds]
    return found if all(are_neighbours(list(map(memory, members))) for members in found) else None


def split_by_kind(lists: Sequence[Sequence[Tensor]], leading: Collection[int]) -> list[list[tuple[int, list[Tensor]]]]:
    """The parameters of each combined buffer: those of one device and dtype, ``leading`` ones apart and first.

    Args:
        lists: Parameters.
        leading: ``id(param)`` of those that have buffers of their own.

    Returns:
        For each buffer its members: the index of a list, and which of its parameters they are.
    """
    found: dict[tuple[bool, torch.device, torch.dtype], list[tuple[int, list[Tensor]]]] = {}
    for index, params in enumerate(lists):
        parts: dict[tuple[bool, torch.device, torch.dtype], list[Tensor]] = {}
        for p in params:
            parts.setdefault((id(p) not in leading, p.device, p.dtype), []).append(p)
        for kind, part in parts.items():
            found.setdefault(kind, []).append((index, part))
    return [found[kind] for kind in sorted(found, key=itemgetter(0))]


def check_combinable() -> None:
    """Require that memory may be laid out otherwise.

    Raises:
        RuntimeError: A CUDA graph is being captured.
    """
    if is_capturing():
        raise RuntimeError(
            "combined buffers cannot be made while a CUDA graph is being captured: tensors would move into them at "
            "once, but their values only when the graph is replayed. Call the accessor once before the capture. "
            "Nothing has moved"
        )
