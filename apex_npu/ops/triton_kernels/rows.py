# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters as matrices: which rows a program sums, and which it updates.

Rows are of any length, so a program does not have one of them. It has a *tile* of ``UNITS`` units, each of which is at
most ``UNIT`` elements of one row and leaves one part of each of the row's sums. Where whole units make up a row, a tile
is one range of memory; else a row's last unit is shorter. Where rows are long, a tile is within one and leaves one
part. Of a parameter that is never projected nothing is summed. The update has chunks of parameters, as LAMB's has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from apex_npu.ops.triton_kernels.chunks import LARGEST, Chunks

UNIT, UNITS = 64, 16
# Columns of Rows.tiles and of Rows.chunk_rows.
TILE_COLUMNS, CHUNK_COLUMNS = 6, 4
_LONG = 1 << 14  # elements of a row that leaves one part for a tile
_BORDER = 2 * LARGEST


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of some parameters; int64 tensors, on the device.

    Attributes:
        tiles: For each tile its first element, or where it is no range that of its parameter; one past the last of its
            parameter, or of its row where that is long; the length of a row; the number of the tile's first unit in its
            parameter; the index of its first part, or -1; 1 where it is a range, plus 2 where it leaves one part.
        part_count: Parts of a sum.
        first_parts: For each row the index of its first part; and at the end their number.
        first_rows: For each parameter the index of its first row; and at the end their number.
        chunks: Of the parameters.
        chunk_rows: For each chunk the row of its first element; how many elements of that row are before it; the
            length of a row; the number of the parameter, from 1. A row of twice the largest chunk or more ends at most
            once in a chunk: for it the second and third are reduced, with the distance to the row's end unchanged.
    """

    tiles: Tensor
    part_count: int
    first_parts: Tensor
    first_rows: Tensor
    chunks: Chunks
    chunk_rows: Tensor

    @staticmethod
    def of(
        starts: Tensor,
        lengths: Tensor,
        owner: Tensor,
        row_limit: Tensor,
        whole_limit: Tensor,
        like: Tensor,
        table: Tensor | None = None,
    ) -> Rows | None:
        """The rows that ``segmented.adamp_`` is given; waits for the device, once for each ``owner``.

        Args:
            starts: See ``segmented.adamp_``.
            lengths: Likewise.
            owner: Likewise.
            row_limit: Likewise.
            whole_limit: Likewise.
            like: A buffer that they are in.
            table: The parameters that they are in, where operands are encoded; see ``dispatch.py``.

        Returns:
            None where the rows of a parameter are no neighbours, or not of one length.
        """
        key = (starts, row_limit, whole_limit, table)
        known = _known.get(owner)
        if known is None or any(a is not b for a, b in zip(known[0], key, strict=True)):
            limited = (row_limit > 0) | (whole_limit > 0)
            known = _known[owner] = key, _find(starts, lengths, owner[:-1].cpu(), limited[1:].cpu(), like, table)
        found: Rows | None = known[1]
        return found


# With what it was made of; gone as soon as ``owner`` is.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _find(
    starts: Tensor, lengths: Tensor, owners: Tensor, summed: Tensor, like: Tensor, table: Tensor | None
) -> Rows | None:
    params = summed.numel()
    counts = torch.bincount(owners, minlength=params + 1)
    if counts.numel() != params + 1 or not bool((owners[1:] >= owners[:-1]).all()) or int(counts[0]):
        return None
    first_rows = counts.cumsum(0)
    # From here on of parameters that have elements, in the order of their rows.
    owners, numbers = owners - 1, torch.arange(owners.numel(), device="cpu") - first_rows[owners - 1]
    present = counts[1:] > 0
    begin, length = (torch.zeros(params, dtype=torch.int64, device="cpu") for _ in range(2))
    begin[present], length[present] = starts[first_rows[:-1][present]], lengths[first_rows[:-1][present]]
    numel = length * counts[1:]
    if not torch.equal(lengths, length[owners]) or not torch.equal(starts, begin[owners] + numbers * length[owners]):
        return None
    summed = summed & (length > 0)
    chunks = Chunks.of(begin, numel, like) if table is None else Chunks.of_params(table, like)
    chunk_rows = _chunk_rows(chunks, begin, length, numel, first_rows[:-1])
    if chunk_rows is None:
        return None
    aligned = not bool((begin % 16).any()) and like.numel() % 16 == 0
    tiles, parts = _cut(starts, owners, numbers, begin, torch.where(summed, length, numel), numel, summed, aligned)
    first_parts = torch.cat([parts.new_zeros(1), parts.cumsum(0)])
    return Rows(
        tiles=tiles.to(like.device),
        part_count=int(first_parts[-1]),
        first_parts=first_parts.to(like.device),
        first_rows=first_rows.to(like.device),
        chunks=chunks,
        chunk_rows=chunk_rows.to(like.device),
    )


def _cut(
    starts: Tensor,
    owners: Tensor,
    numbers: Tensor,
    begin: Tensor,
    length: Tensor,
    numel: Tensor,
    summed: Tensor,
    aligned: bool,
) -> tuple[Tensor, Tensor]:
    """The tiles, and for each row how many parts it has."""
    long = summed & (length >= _LONG)
    per_row = -(-length // UNIT)
    tiles_of_row = -(-per_row // UNITS)
    parts = torch.where(summed, torch.where(long, tiles_of_row, per_row), 0)[owners]
    # What is cut as one: a long row, or a parameter, whose first row stands for it here.
    stands = long[owners] | (numbers == 0)
    owner, at = owners[stands], starts[stands]
    whole, unit_count = long[owner], torch.where(long, per_row, numel // length.clamp(min=1) * per_row)[owner]
    is_range = (length % UNIT == 0) | ~summed | (long & (length % 16 == 0))
    is_range = is_range[owner] if aligned else torch.zeros_like(whole)
    end = torch.where(whole, at + length[owner], (begin + numel)[owner])
    part_count = torch.where(summed[owner], torch.where(whole, tiles_of_row[owner], unit_count), 0)
    first_part = part_count.cumsum(0) - part_count
    # Of tiles.
    tile_count = -(-unit_count // UNITS)
    cut = torch.repeat_interleave(torch.arange(owner.numel(), device="cpu"), tile_count)
    tile = torch.arange(cut.numel(), device="cpu") - (tile_count.cumsum(0) - tile_count)[cut]
    first = torch.where(is_range[cut], at[cut] + tile * (UNIT * UNITS), at[cut])
    part = torch.where(summed[owner][cut], first_part[cut] + torch.where(whole[cut], tile, tile * UNITS), -1)
    kind = is_range[cut] + 2 * whole[cut]
    return torch.stack([first, end[cut], length[owner][cut], tile * UNITS, part, kind], dim=1), parts


def _chunk_rows(chunks: Chunks, begin: Tensor, length: Tensor, numel: Tensor, first_rows: Tensor) -> Tensor | None:
    """See ``Rows.chunk_rows``; None where a chunk is of no parameter."""
    present = torch.nonzero(numel).flatten()
    begins, ends = chunks.begins.cpu(), chunks.ends.cpu()
    order = begin[present]
    if not bool((order[1:] >= order[:-1]).all()):
        return None
    param = torch.searchsorted(order, begins, right=True) - 1
    if bool((param < 0).any()):
        return None
    param = present[param]
    if bool((ends > (begin + numel)[param]).any()):
        return None
    before = begins - begin[param]
    row_length = length[param]
    row, into = before // row_length, before % row_length
    left = (row_length - into).clamp(max=_BORDER)
    large = row_length >= _BORDER
    into, row_length = torch.where(large, _BORDER - left, into), row_length.clamp(max=_BORDER)
    return torch.stack([first_rows[param] + row, into, row_length, param + 1], dim=1)
