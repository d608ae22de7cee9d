# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Chunks of segments, one for each program, so that sums over segments need no atomic operations.

A sum takes two launches: one adds up each chunk, the other the chunks of each segment, in order. The result depends on
neither the device nor the order in which programs run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from apex_npu.backends import number_on
from apex_npu.ops.state_codec import SCALE_NUMEL

LARGEST, _SMALLEST = 2048, 128
ROW_COLUMNS = 4  # of Chunks.rows: a row is a multiple of 16 bytes, so that every launch begins at one

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Chunks:
    """The ranges of the chunks of some segments; int64, on the device.

    Attributes:
        begins: The first element of each chunk.
        ends: The element after the last of each chunk.
        owners: The index of the segment of each chunk.
        firsts: The index of the first chunk of each segment, and at the end the number of chunks.
        size: The maximum number of elements in a chunk; a power of two.
        aligned: Every segment begins at a multiple of 16, with padding up to the next segment.
        places: If operands are encoded, the table of ``formats.Encoding.places``; else None.
    """

    begins: Tensor
    ends: Tensor
    owners: Tensor
    firsts: Tensor
    size: int
    aligned: bool
    places: Tensor | None = None

    @functools.cached_property
    def rows(self) -> Tensor:
        """A row for each chunk: its first element, the element after its last, and the index of its segment, twice."""
        return torch.stack([self.begins, self.ends, self.owners, self.owners], dim=1)

    @staticmethod
    def of(starts: Tensor, lengths: Tensor, like: Tensor, table: Tensor | None = None) -> Chunks:
        """Return the chunks of segments of ``like`` that are given on the host; they are made once for each ``starts``.

        Args:
            starts: The first element of each segment.
            lengths: The number of elements of each segment.
            like: A buffer that contains the segments.
            table: If operands are encoded, the table of their parameters (see ``dispatch.py``); else None.
        """
        if table is None:
            return _made_once(_chunks, starts, lambda: _cut(starts, lengths, like))
        return _made_once(_encoded_chunks, starts, lambda: _cut(starts, lengths, like, table))

    @staticmethod
    def of_params(table: Tensor, like: Tensor) -> Chunks:
        """Return the chunks of the parameters of ``table``; they are made once for each ``table``."""
        return _made_once(_encoded_chunks, table, lambda: _cut(table[:, 0], table[:, 1], like, table))


# The chunks of each tensor of starts; an entry is removed together with the tensor.
_chunks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_encoded_chunks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _made_once(known: WeakTensorKeyDictionary, key: Tensor, make: Callable[[], _T]) -> _T:
    found: _T | None = known.get(key)
    if found is None:
        found = known[key] = make()
    return found


def _cut(starts: Tensor, lengths: Tensor, like: Tensor, table: Tensor | None = None) -> Chunks:
    longest = int(lengths.max()) if lengths.numel() else 0
    size = min(LARGEST, max(_SMALLEST, 1 << (longest - 1).bit_length() if longest else 0))
    counts = (lengths + (size - 1)) // size
    firsts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    owners = torch.repeat_interleave(torch.arange(counts.numel(), device="cpu"), counts)
    begins = starts[owners] + (torch.arange(owners.numel(), device="cpu") - firsts[owners]) * size
    ends = torch.minimum(begins + size, (starts + lengths)[owners])
    aligned = not bool((starts % 16).any()) and like.numel() % 16 == 0
    joined = number_on(torch.cat([begins, ends, owners, firsts]), like.device)
    count = owners.numel()
    columns = joined[:count], joined[count : 2 * count], joined[2 * count : 3 * count], joined[3 * count :]
    places = None if table is None else number_on(_places(begins, ends, table), like.device)
    return Chunks(*columns, size=size, aligned=aligned, places=places)


def _places(begins: Tensor, ends: Tensor, table: Tensor) -> Tensor:
    """Return the rows of ``formats.Encoding.places``."""
    param_begins, _, positions, first_scales = table.unbind(1)
    param = torch.searchsorted(param_begins.contiguous(), begins, right=True) - 1
    numbers = begins - param_begins[param]
    scales = first_scales[param] + numbers // SCALE_NUMEL
    return torch.stack([begins, ends, numbers, positions[param], scales], dim=1)
