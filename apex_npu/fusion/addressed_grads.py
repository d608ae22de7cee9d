# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that GPU kernels read by tables of addresses, in any memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from apex_npu._extension import extension
from apex_npu.fusion.grad_memory import GradMemory
from apex_npu.fusion.grad_slots import ELSEWHERE, IN_BUFFER, places_of
from apex_npu.ops import AddressTable, ListedSlots, gather_


class AddressedGrads:
    """Copies gradients into the slots of one buffer, or lets kernels read and write them in place."""

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
