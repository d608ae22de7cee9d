# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Copies gradients into slots, and multiplies and checks them.

The functions are not dispatcher ops, because passing lists to those is slow. On a CPU they use the C++ extension
(csrc/fused_optim) if it is loaded; ``gather_torch.py`` does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.ops import gather_cuda, gather_torch
from apex_npu.ops.gather_cuda import takes_addresses
from apex_npu.ops.grad_lists import is_grad_list
from apex_npu.ops.reference import FLOATS
from apex_npu.ops.segmented import norm


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
        extension.gather_cpu(slots, grads, inv_scale, found_inf)
    elif slots:
        torch._foreach_copy_(list(slots), list(grads))
        gather_torch.unscale_grads(list(slots), inv_scale, found_inf)


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
        gather_torch.unscale_grads(slots, 1.0, found_inf)


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
                gather_cuda.scale_listed(listed, inv_scale, found_inf)
            # Checking the norm first is faster; it is finite if all elements are, unless it overflows itself.
            elif inv_scale != 1.0 or not math.isfinite(norm(listed)):
                extension.scale_grad_list(listed, inv_scale, found_inf)
    # Subclasses may have only inner tensors instead of memory (DTensor).
    elif (
        inv_scale != 1.0
        and gathers_in_one_pass(grads[0])
        and all(type(g) is Tensor and g.is_contiguous() for g in grads)
    ):
        extension.gather_cpu(grads, grads, inv_scale, found_inf)
    else:
        gather_torch.unscale_grads(grads, inv_scale, found_inf)


def multiply_(grads: Tensor, factor: Tensor) -> None:
    """Multiply a dense tensor or a list of gradients in place by ``factor``, one number on their device."""
    if is_grad_list(grads) and grads.device.type != "cpu":
        gather_cuda.scale_listed(grads, factor.to(grads.dtype))
    elif is_grad_list(grads):
        extension.scale_grad_list(grads, factor.to(grads.dtype).item(), None)
    else:
        grads.mul_(factor.to(grads.dtype))


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
