# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Copies gradients into slots, and multiplies and checks them.

The functions are not dispatcher ops, because passing lists to those is slow. On a CPU they use the C++ extension
(csrc/fused_optim) if it is loaded, on a GPU Triton kernels that follow a table of addresses, in one launch for any
number of gradients. torch's operators do the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.ops import cuda
from apex_npu.ops.grad_lists import SentTables, is_grad_list
from apex_npu.ops.reference import FLOATS, LOW_PRECISION
from apex_npu.ops.segmented import norm
from apex_npu.ops.triton_kernels.chunks import Chunks


def gathers_in_one_pass(slot: Tensor) -> bool:
    """Return whether ``gather_`` copies, widens, multiplies and checks every element in one pass."""
    return extension is not None and slot.device.type == "cpu" and slot.dtype in FLOATS


@torch.no_grad()
def gather_(
    slots: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: float = 1.0, found_inf: Tensor | None = None
) -> None:
    """Write grad · inv_scale into the slot, for each pair.

    Args:
        slots: Dense tensors of one dtype and device that do not overlap.
        grads: Tensors of the same shapes, of any floating dtype; they are widened before they are multiplied.
        inv_scale: 1 / loss scale.
        found_inf: float32, one element; set to 1 if an element of a gradient is inf or nan. None if this is not
            checked.
    """
    if slots and gathers_in_one_pass(slots[0]) and all(grad.dtype in FLOATS for grad in grads):
        extension.gather_cpu(slots, grads, inv_scale, found_inf, False)
    elif slots:
        torch._foreach_copy_(list(slots), list(grads))
        unscale_dense(list(slots), inv_scale, found_inf)


def accumulate_(slots: list[Tensor], grads: list[Tensor], inv_scale: float, found_inf: Tensor | None) -> None:
    """Add grad · inv_scale to the float32 slot, for each pair.

    Args:
        slots: Dense float32 tensors of one device that do not overlap.
        grads: Tensors of the same shapes, of any floating dtype.
        inv_scale: 1 / loss scale.
        found_inf: float32, one element; set to 1 if an element of a sum is inf or nan. None if this is not checked.
    """
    if slots and gathers_in_one_pass(slots[0]) and all(grad.dtype in FLOATS for grad in grads):
        extension.gather_cpu(slots, grads, inv_scale, found_inf, True)
    elif slots:
        torch._foreach_add_(slots, grads, alpha=inv_scale)
        unscale_dense(slots, 1.0, found_inf)


def unscale_grads(grads: list[Tensor], inv_scale: float, found_inf: Tensor | None) -> None:
    """Multiply ``grads``, all of one device and dtype, by ``inv_scale``.

    Args:
        grads: Dense tensors, or only lists of gradients.
        inv_scale: 1 / loss scale.
        found_inf: float32, one element; set to 1 if a gradient is not finite. None if this is not checked.
    """
    if not grads or (inv_scale == 1.0 and found_inf is None):
        return
    if is_grad_list(grads[0]):
        for listed in grads:
            if listed.device.type != "cpu":
                scale_listed(listed, inv_scale, found_inf)
            # Checking the norm first is faster; it is finite if all elements are, unless it overflows itself.
            elif inv_scale != 1.0 or not math.isfinite(norm(listed)):
                extension.scale_grad_list(listed, inv_scale, found_inf)
    # Subclasses may have only inner tensors instead of memory (DTensor).
    elif (
        inv_scale != 1.0
        and gathers_in_one_pass(grads[0])
        and all(type(g) is Tensor and g.is_contiguous() for g in grads)
    ):
        extension.gather_cpu(grads, grads, inv_scale, found_inf, False)
    else:
        unscale_dense(grads, inv_scale, found_inf)


def multiply_(grads: Tensor, factor: Tensor) -> None:
    """Multiply a dense tensor or a list of gradients in place by ``factor``, one number on their device."""
    if is_grad_list(grads) and grads.device.type != "cpu":
        scale_listed(grads, factor.to(grads.dtype))
    elif is_grad_list(grads):
        extension.scale_grad_list(grads, factor.to(grads.dtype).item(), None)
    else:
        grads.mul_(factor.to(grads.dtype))


def unscale_dense(grads: list[Tensor], inv_scale: float, found_inf: Tensor | None) -> None:
    """Do what ``unscale_grads`` does, for dense tensors, by torch's operators."""
    if not grads or (inv_scale == 1.0 and found_inf is None):
        return
    if grads[0].is_complex():
        grads = [as_real(grad) for grad in grads]
    # Subclasses may have only inner tensors instead of memory (DTensor); torch's own ops handle them.
    plain = all(type(grad) is Tensor for grad in grads)
    if plain and inv_scale == 1.0 and found_inf is not None and found_inf.device.type == "cpu":
        if not all(map(_is_finite, grads)):
            found_inf.fill_(1.0)
    elif found_inf is not None and plain and _checks_by_norms(grads[0]):
        _look(grads, found_inf)
        if inv_scale != 1.0:
            torch._foreach_mul_(grads, inv_scale)
    elif found_inf is not None:
        # One pass multiplies and checks every element. It takes the fewest calls even if there is nothing to multiply.
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, _factor_beside(found_inf, inv_scale))
    else:
        torch._foreach_mul_(grads, inv_scale)


def _factor_beside(found_inf: Tensor, inv_scale: float) -> Tensor:
    """Return ``inv_scale`` on the device of ``found_inf``; the tensor is kept with the flag and made only once."""
    known: tuple[float, Tensor] | None = vars(found_inf).get("factor")
    if known is None or known[0] != inv_scale:
        # A 0-dim tensor, as GradScaler's: chips that saturate multiply a gradient of the factor's shape in place by it.
        factor = torch.full((), inv_scale, dtype=torch.float32, device=found_inf.device)
        known = vars(found_inf)["factor"] = inv_scale, factor
    return known[1]


def as_real(tensor: Tensor) -> Tensor:
    """Return a real view of complex numbers, or of their conjugates."""
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def _checks_by_norms(grad: Tensor) -> bool:
    """Return whether torch's kernel cannot check: on cuda it lacks bfloat16, and treats large float64 values as inf."""
    return grad.is_cuda and grad.dtype not in {torch.float32, torch.float16}


def _look(grads: list[Tensor], found_inf: Tensor) -> None:
    """Set ``found_inf`` if an element is not finite, without a wait: by the largest magnitude of each gradient."""
    filled = [grad for grad in grads if grad.numel()]
    if filled:
        largest = torch.stack(torch._foreach_norm(filled, math.inf))
        # inf - inf and nan - nan are nan, which counts as true.
        found_inf.logical_or_((largest - largest).any())


def _is_finite(grad: Tensor) -> bool:
    """Return whether every element is finite, first by the fast norm, which may overflow although elements do not."""
    if grad.dtype not in LOW_PRECISION and math.isfinite(torch.linalg.vector_norm(grad)):
        return True
    return math.isfinite(norm(grad.reshape(-1))) or bool(grad.isfinite().all())


def scale_listed(grads: Tensor, factor: float | Tensor, found_inf: Tensor | None = None) -> None:
    """Multiply in place the gradients that the operand ``grads`` lists; see ``unscale_grads``."""
    if not cuda.run("scale_listed", grads, factor, found_inf):
        found = [grad for grad, _ in extension.listed_grads(grads)]
        if isinstance(factor, Tensor):
            torch._foreach_mul_(found, factor)
        else:
            for dtype in {grad.dtype for grad in found}:
                unscale_dense([grad for grad in found if grad.dtype == dtype], factor, found_inf)
    if isinstance(factor, Tensor) or factor != 1.0:
        extension.count_grad_writes(grads)  # of which autograd sees nothing


def cats_lists(device: torch.device) -> bool:
    """Return whether ``cat_into`` copies a long list faster than launches for a few tensors each."""
    return device.type == "npu"


@torch.no_grad()
def cat_into(out: Tensor, tensors: Sequence[Tensor], gaps: Sequence[int], zeros: Tensor) -> None:
    """Concatenate ``tensors`` into ``out``, with zeros between them, in one launch.

    Args:
        out: 1-D, of the total length, of any floating dtype.
        tensors: 1-D tensors that do not overlap ``out``.
        gaps: The number of zeros after each tensor; the last may be 0.
        zeros: 1-D zeros, at least as many as the largest gap. They have the dtype of the tensors, unless these differ:
            a list of one dtype is converted as a whole.
    """
    pads = {gap: zeros[:gap] for gap in set(gaps)}
    pieces: list[Tensor] = [zeros] * (2 * len(tensors))
    pieces[0::2] = tensors
    pieces[1::2] = map(pads.__getitem__, gaps)
    torch.cat(pieces, out=out)


def reads_listed(slot: Tensor) -> bool:
    """Return whether ops read and write gradients of slots like this one in place, as one operand."""
    return extension is not None and (slot.device.type == "cpu" or takes_addresses(slot))


def takes_grads(slot: Tensor) -> bool:
    """Return whether a kernel gathers, multiplies and checks gradients in one pass, which is faster."""
    return (slot.device.type == "cpu" and slot.dtype in FLOATS) or takes_addresses(slot)


def divides_in_update(device: torch.device) -> bool:
    """Return whether an update with a ``grad_scale`` takes no more launches and passes than one without."""
    return device.type != "npu"


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
