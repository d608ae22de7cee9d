# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The memory of gradients, and how gradients get there.

The memory is a flat buffer with a view for each slot. Between steps only the views may own it. Kernels of a GPU copy
gradients by a table of their addresses (``AddressedGrads``). Devices without a kernel that copies all in one pass do so
in batches (``GradCopier``).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.backends import is_capturing
from apex_npu.fusion.flat_buffer import FlatBuffer, gaps_between
from apex_npu.fusion.grad_slots import ELSEWHERE, IN_BUFFER, check_grad, places_of
from apex_npu.fusion.storage import SlotTable, move_out
from apex_npu.ops import cats_lists
from apex_npu.ops.gather import AddressTable, cat_into, gather_, reads_listed
from apex_npu.ops.grad_lists import ListedSlots

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


class AddressedGrads:
    """Copies gradients into the slots of one buffer, or lets kernels read and write them where they are, on a GPU."""

    def __init__(self, memory: GradMemory) -> None:
        """Make an object for the buffer of ``memory``."""
        self._memory = memory
        self._table: AddressTable | None = None
        self._slots: dict[tuple[int, int], ListedSlots] = {}

    def add_addresses(self, listed: Tensor, slots: range) -> None:
        """Add the addresses of the gradients of consecutive ``slots`` to the operand ``listed`` of kernels."""
        key = slots.start, slots.stop
        if key not in self._slots:
            if len(self._slots) > 2 * len(self._memory.params):  # a step has no more runs than parameters
                self._slots.clear()
            offsets = self._memory.offsets[slots.start : slots.stop]
            shapes = self._memory.shapes[slots.start : slots.stop]
            begins = [offset - offsets[0] for offset in offsets]
            self._slots[key] = ListedSlots(begins, [shape.numel() for shape in shapes])
        self._slots[key].add_addresses(listed)

    def take(
        self,
        flat: Tensor,
        slots: Sequence[int] | None,
        inv_scale: float,
        found_inf: Tensor | None,
    ) -> tuple[bytes, bool] | None:
        """Copy gradients into ``slots`` of the buffer ``flat``; see ``FlatGrads.take``.

        Returns:
            The states of the slots afterwards, and whether the caller must still multiply and check all gradients: if
            ``slots`` is None and some gradients were in the buffer before. None, with nothing done, if the kernel does
            not compile.
        """
        memory, params = self._memory, self._memory.params
        if self._table is None:
            self._table = AddressTable(flat, memory.offsets, [p.numel() for p in params])
        span = slots if isinstance(slots, range) else range(len(params))
        chosen = None if slots is None or slots is span else slots
        looked_at, addresses = params[span.start : span.stop], self._table.addresses

        def look() -> Any:
            views = memory.views[span.start : span.stop]
            return memory.slots.addresses(looked_at, views, span.start, chosen, flat, addresses)

        states, others, dtype, views_are_free = look()
        if ELSEWHERE in states and not views_are_free:
            memory.free_views()
            states, others, dtype, _ = look()
        apart = slots is None and IN_BUFFER in states and (inv_scale != 1.0 or found_inf is not None)
        if ELSEWHERE in states:
            scaling = (1.0, None) if apart else (inv_scale, found_inf)
            grads = [grad for i in others if (grad := params[i].grad) is not None]
            grads = memory.readable(others, grads) if others else []
            if dtype is not None and not self._table.take(dtype, *scaling, span):
                return None
            if grads:
                gather_([memory.views[i] for i in others], grads, *scaling)
            self._show_views(states, span)
            states = states.replace(bytes([ELSEWHERE]), bytes([IN_BUFFER]))
        return states, apart

    def _show_views(self, states: bytes, slots: range) -> None:
        """Set the views of those ``slots`` whose state is ELSEWHERE as gradients of their parameters."""
        params, views = self._memory.params, self._memory.views
        if states.count(ELSEWHERE) < len(views):
            taken = [slots.start + i for i in places_of(ELSEWHERE, states)]
            params, views = [params[i] for i in taken], [views[i] for i in taken]
        extension.set_grads(params, views)


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
