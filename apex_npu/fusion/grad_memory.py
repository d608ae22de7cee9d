# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The memory of gradients: a flat buffer with a view for each slot. Between steps only the views may own it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.backends import is_capturing
from apex_npu.fusion.flat_buffer import FlatBuffer
from apex_npu.fusion.grad_slots import check_grad
from apex_npu.fusion.storage import SlotTable, move_out
from apex_npu.ops import cats_lists, reads_listed

# Buffers of at least this many elements are lent. A smaller float32 buffer takes at most 32 MiB, and is kept.
LENT_NUMEL = 1 << 23

_DTYPE, _LAYOUT, _DEVICE = map(attrgetter, ("dtype", "layout", "device"))


class GradMemory:
    """One buffer, allocated at first use. ``let_go`` lends its memory to the gradients in it.

    Lent memory is freed when these gradients are cleared in any way. ``take_up`` takes it back, and ``allocate`` gives
    the buffer other memory if it still ``is_lent``.

    Attributes:
        params: The parameters, one for each slot.
        shapes: Meta tensors with the sizes, strides and dtype of the slots.
        offsets: For each slot, the number of elements before it.
        slots: The ``GradSlots`` that finds gradients in the slots.
        views: The views of the slots, for ``param.grad``; empty while there is no memory.
        view_table: The places of the views.
        lends: ``let_go`` has an effect.
        is_sent: Processes are averaging the buffer, during which ``let_go`` has no effect.
        is_lent: The buffer has no memory.
        is_padded: There are zeros between the slots, or will be when the memory is taken back.
    """

    def __init__(
        self, params: Sequence[Tensor], offsets: Sequence[int], total_numel: int, dtype: torch.dtype | None = None
    ) -> None:
        """Plan memory for gradients in ``dtype``; None: the dtype of ``params``, which share dtype and device."""
        # Slots are shaped like the gradients that autograd makes: with a parameter's strides if dense, else contiguous.
        self.shapes = [torch.empty_like(p, device="meta", dtype=dtype) for p in params]
        self.offsets = list(offsets)
        listed = bool(params) and reads_listed(params[0])
        # Only gradients on this device can stay elsewhere.
        device = params[0].device if listed else None
        self.slots: Any = extension.GradSlots(self.shapes, self.offsets, device)
        self.views: list[Tensor] = []
        self.view_table = SlotTable([])
        self.lends = bool(params) and may_lend(params[0]) and total_numel >= LENT_NUMEL
        self.is_sent = self.is_lent = self.is_padded = False
        self.params, self._total_numel = list(params), total_numel
        self._buffer: FlatBuffer | None = None
        self._padding: Tensor | None = None

    def allocate(self, *, pads: bool = False) -> Tensor:
        """Return the buffer, with memory, and zeros in the padding.

        With ``pads``, the caller writes the zeros by a copy into all slots.

        Raises:
            torch.OutOfMemoryError: There is not enough memory.
        """
        buffer, is_padded = self._buffer, True
        if buffer is None or self.is_lent:
            like = self.params[0]
            if buffer is None:
                buffer = FlatBuffer(self._total_numel, self.shapes[0].dtype, like.device)
            else:
                buffer.renew()
                is_padded = cats_lists(like.device) and not pads
                if is_padded:  # an NPU fills all elements faster than only those between slots
                    buffer.flat.zero_()
            views = buffer.views_like(self.shapes, self.offsets)
            table = SlotTable(views)
            self.slots.remember_views(views)
            self._buffer, self.views, self.view_table = buffer, views, table
            self.is_padded, self.is_lent = is_padded, False
        if not self.is_padded and not pads:
            self.clear_padding()
            self.is_padded = True
        return buffer.flat

    def let_go(self) -> None:
        """Leave the buffer's memory to the gradients in it, if it ``lends``.

        Slices of the buffer's tensor have memory again when the buffer has.
        """
        if not self.lends or self.is_sent or self._buffer is None or not self.views:
            return
        if is_capturing():  # a replay writes to the addresses of the capture
            self.lends = False
            return
        self.is_lent, self.views = True, []  # first: after an error below, the buffer gets new memory
        self.slots.let_go(self._buffer.flat)

    def take_up(self) -> None:
        """Own the memory again, if it still exists and holds only gradients; else give it up."""
        assert self._buffer is not None
        views: list[Tensor] | None = self.slots.take_up(self.params, self._buffer.flat)
        if views is not None:
            self.views, self.is_lent = views, False

    def free_views(self) -> None:
        """Move views back into their slots, and move former gradients that are still referenced out of them."""
        lost, kept = extension.lost_and_kept(self.view_table, self.views, self.params)
        self._renew_views(lost)
        self.move_out(kept)

    def move_out(self, indices: Sequence[int]) -> None:
        """Move former gradients that are still referenced out of their slots, before others are written there."""
        for i in indices:
            move_out(self.views[i])  # first: after an error here, the view is found as lost
            self._renew_views([i])

    def _renew_views(self, indices: Sequence[int]) -> None:
        for i in indices:
            assert self._buffer is not None
            shape = self.shapes[i]
            self.views[i] = self._buffer.view(self.offsets[i], shape.size(), shape.stride())

    def readable(self, indices: Sequence[int], grads: list[Tensor]) -> list[Tensor]:
        """Return ``grads``, those of the slots ``indices``, and clone those in slots, which will be written.

        Raises:
            RuntimeError: A gradient is sparse, not of its parameter's dtype, or a subclass such as DTensor.
        """
        alike = set(map(type, grads)) <= {Tensor} and set(map(_LAYOUT, grads)) <= {torch.strided}
        like = self.params[0]
        same_kind = set(map(_DTYPE, grads)) <= {self.shapes[0].dtype} and set(map(_DEVICE, grads)) <= {like.device}
        if not alike or not same_kind:
            for i, grad in zip(indices, grads, strict=True):
                check_grad(i, self.params[i], grad, self.shapes[i].dtype)
        if self.views and self._buffer is not None:  # else the copies go to new memory
            begin = self._buffer.flat.data_ptr()
            end = begin + self._buffer.flat.nbytes
            for k in [k for k, address in enumerate(map(Tensor.data_ptr, grads)) if begin <= address < end]:
                grads[k] = grads[k].clone()
        return grads

    def clear_padding(self) -> None:
        """Write zeros between the slots, if there is memory."""
        if self._buffer is not None and self.views:
            self._buffer.flat.index_fill_(0, self.find_padding(), 0.0)

    def find_padding(self) -> Tensor:
        """Return the indices of the elements between the slots."""
        if self._padding is None:
            slots = zip(self.offsets, self.shapes, strict=True)
            used = sorted((begin, begin + shape.numel()) for begin, shape in slots)
            gaps = zip([0, *(end for _, end in used)], [*(begin for begin, _ in used), self._total_numel], strict=True)
            found = [torch.arange(begin, end, device="cpu") for begin, end in gaps if begin < end]
            self._padding = torch.cat([torch.arange(0, device="cpu"), *found]).to(self.params[0].device)
        return self._padding


def may_lend(slot: Tensor) -> bool:
    """Return True if new memory costs only its allocation: the device is not a CPU."""
    return slot.device.type != "cpu"
