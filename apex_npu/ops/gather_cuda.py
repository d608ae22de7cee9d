# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Copies gradients into slots by a table of their addresses, in one launch for any number of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.ops import cuda, gather_torch
from apex_npu.ops.grad_lists import SentTables
from apex_npu.ops.reference import FLOATS
from apex_npu.ops.triton_kernels.chunks import Chunks


def takes_addresses(slot: Tensor) -> bool:
    """Return whether an ``AddressTable`` can write gradients into slots like this one."""
    return extension is not None and slot.dtype in FLOATS and cuda.can_run("take_addressed", slot.device)


class AddressTable:
    """The slots of a flat buffer in chunks, one for each program of a kernel that follows addresses.

    Attributes:
        addresses: int64 on the host, one for each slot: ``GradSlots.addresses`` writes it and ``take`` reads it.
    """

    def __init__(self, flat: Tensor, offsets: Sequence[int], numels: Sequence[int]) -> None:
        """Set the buffer ``flat``, with slots of ``numels`` elements that begin at ``offsets``."""
        starts, lengths = (torch.tensor(given, dtype=torch.int64, device="cpu") for given in (offsets, numels))
        chunks = Chunks.of(starts, lengths, flat)
        self._flat = flat
        self._chunks = chunks.rows
        self._size, self._aligned = chunks.size, chunks.aligned
        self.addresses = torch.zeros(len(offsets), dtype=torch.int64, device="cpu")
        self._sent = SentTables()
        self._kept: dict[Any, Any] = {}
        self._firsts = [0, *((lengths + (chunks.size - 1)) // chunks.size).cumsum(0).tolist()]

    def take(self, dtype: torch.dtype, inv_scale: float, found_inf: Tensor | None, slots: range) -> bool:
        """Write gradient · inv_scale into each of ``slots`` that has an address, in one launch and without a wait.

        Args:
            dtype: The dtype of all gradients.
            inv_scale: 1 / loss scale.
            found_inf: float32, one element; set to 1 if an element of a gradient is inf or nan. None if this is not
                checked.
            slots: The indices of consecutive slots.

        Returns:
            False, with nothing written, if Triton cannot compile the kernel; else True.
        """
        chunks, firsts = self._chunks, self._firsts
        if len(slots) < len(firsts) - 1:
            chunks = chunks[firsts[slots.start] : firsts[slots.stop]]
        on_device = self._sent.on(self._flat.device, self.addresses)
        how = dtype, inv_scale, found_inf, self._size, self._aligned, self._kept
        return cuda.run("take_addressed", self._flat, chunks, on_device, *how)


def scale_listed(grads: Tensor, factor: float | Tensor, found_inf: Tensor | None = None) -> None:
    """Multiply in place the gradients that the operand ``grads`` lists; see ``gather.unscale_grads``."""
    if not cuda.run("scale_listed", grads, factor, found_inf):
        found = [grad for grad, _ in extension.listed_grads(grads)]
        if isinstance(factor, Tensor):
            torch._foreach_mul_(found, factor)
        else:
            for dtype in {grad.dtype for grad in found}:
                gather_torch.unscale_grads([grad for grad in found if grad.dtype == dtype], factor, found_inf)
    if isinstance(factor, Tensor) or factor != 1.0:
        extension.count_grad_writes(grads)  # of which autograd sees nothing
