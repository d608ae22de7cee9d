# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Copies many gradients into their slots, on devices without a kernel that copies all in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.fusion.flat_buffer import FlatBuffer
from apex_npu.fusion.layout import gaps_between
from apex_npu.ops import cat_into, cats_lists, gather_

# An NPU copies this many tensors in one launch. Joining neighbours is faster if their batches are longer on average.
_JOINED_COUNT = 48


class GradCopier:
    """Copies gradients into slots. Neighbours are copied together if this saves launches."""

    def __init__(self, flat: Tensor, offsets: Sequence[int], shapes: Sequence[Tensor], *, pads: bool = False) -> None:
        """Copy into ``flat``, whose slots begin at ``offsets`` and have the sizes and strides of ``shapes``.

        With ``pads``, copies of neighbours also write zeros up to the next slot.
        """
        self._flat, self._offsets, self._shapes = flat, offsets, shapes
        self._ends = [*offsets[1:], flat.numel()] if pads else []
        self._joins = cats_lists(flat.device)
        self._batched: tuple[list[int], list[range]] = ([], [])
        self._zeros: dict[torch.dtype, Tensor] = {}

    def copy_in(self, indices: list[int], views: list[Tensor], grads: list[Tensor]) -> None:
        """Copy ``grads`` into the slots ``indices``, which have these ``views``."""
        batches = self.batches(indices) if self._joins else []
        if not batches or len(batches) * _JOINED_COUNT > len(indices) + _JOINED_COUNT:
            gather_(views, grads)
            return
        rows = self._rows(indices, grads)
        end = 0
        for batch in batches:
            begin, end = end, end + len(batch)
            offsets = self._offsets[batch.start : batch.stop]
            gaps = gaps_between(offsets, [row.numel() for row in rows[begin:end]])
            stop = offsets[-1] + rows[end - 1].numel()
            if self._ends:
                gaps[-1] = self._ends[batch.stop - 1] - stop
            stretch = self._flat[offsets[0] : stop + gaps[-1]]
            cat_into(stretch, rows[begin:end], gaps, self._zeros_of(rows[begin].dtype, max(gaps)))

    def _rows(self, indices: list[int], grads: list[Tensor]) -> list[Tensor]:
        """Return ``grads`` as 1-D tensors, with their elements in the memory order of the slots ``indices``."""
        shapes = [self._shapes[i] for i in indices]
        in_order = [
            a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())
            for a, b in zip(grads, shapes, strict=True)
        ]
        if not all(in_order):
            grads = [
                grad if alike else torch.empty_like(shape, device=grad.device).copy_(grad)
                for grad, shape, alike in zip(grads, shapes, in_order, strict=True)
            ]
        return [grad.detach().as_strided((grad.numel(),), (1,)) for grad in grads]

    def _zeros_of(self, dtype: torch.dtype, numel: int) -> Tensor:
        zeros = self._zeros.get(dtype)
        if zeros is None or zeros.numel() < numel:
            zeros = self._zeros[dtype] = FlatBuffer(numel, dtype, self._flat.device).flat
        return zeros

    def batches(self, indices: list[int]) -> list[range]:
        """Return the ranges of neighbours among ``indices``."""
        if self._batched[0] != indices:
            found = []
            begin = 0
            for k in range(1, len(indices) + 1):
                if k == len(indices) or indices[k] != indices[k - 1] + 1:
                    found.append(range(indices[begin], indices[k - 1] + 1))
                    begin = k
            self._batched = (indices, found)
        return self._batched[1]
