# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients, as autograd has left them, on their way into slots. Not a dispatcher op: lists are slow to pass there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.ops.reference import FLOATS, LOW_PRECISION
from apex_npu.ops.segmented import norm


def gathers_in_one_pass(slot: Tensor) -> bool:
    """True where ``gather_`` copies, widens, multiplies and looks at every element in one pass."""
    return extension is not None and takes_grads(slot)


def take_grads_(
    sources: Sequence[Tensor],
    params: Sequence[Tensor],
    slots: Sequence[Tensor],
    inv_scale: float = 1.0,
    found_inf: Tensor | None = None,
) -> int | None:
    """Gather the gradients of ``sources``, those that are there, into ``slots``, and make these ``params``' gradients.

    Only where ``gathers_in_one_pass(slots[0])``: one call, however many there are. For the rest see ``gather_``.

    Args:
        sources: Where autograd leaves the gradients of ``params``: those, or for a master its model parameter.
        params: One for each.
        slots: Likewise.
        inv_scale: See ``gather_``.
        found_inf: See ``gather_``.

    Returns:
        The index of the first gradient that is sparse, not of its parameter's dtype, or a subclass with dispatch of its
        own, with nothing written; or None.
    """
    assert extension is not None
    unfit: int = extension.take_grads_cpu(sources, params, slots, inv_scale, found_inf)
    return None if unfit < 0 else unfit


@torch.no_grad()
def gather_(
    slots: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: float = 1.0, found_inf: Tensor | None = None
) -> None:
    """Write grad · inv_scale into its slot, for each pair.

    Args:
        slots: Dense, of one dtype and device, not overlapping.
        grads: Shaped like them; of any floating dtype, widened before they are multiplied.
        inv_scale: 1 / loss scale.
        found_inf: float32, one element; set to 1 where an element of a gradient is inf or nan. None: do not look.
    """
    if not slots:
        return
    if gathers_in_one_pass(slots[0]) and all(grad.dtype in FLOATS for grad in grads):
        assert extension is not None
        extension.gather_cpu(slots, grads, inv_scale, found_inf)
        return
    slots = list(slots)
    torch._foreach_copy_(slots, list(grads))
    unscale_grads(slots, inv_scale, found_inf)


def joins_lists(device: torch.device) -> bool:
    """True where a long list is brought into one tensor by ``join_``, rather than by a launch for every few of them."""
    return device.type == "npu"


@torch.no_grad()
def join_(out: Tensor, tensors: Sequence[Tensor], gaps: Sequence[int], zeros: Tensor) -> None:
    """Write ``tensors``, one after the other with zeros between them, in one launch however many there are.

    Args:
        out: 1-D, as long as all of that; of any floating dtype.
        tensors: 1-D, and none of them in the memory of ``out``.
        gaps: For each how many zeros follow it; for the last there need be none.
        zeros: 1-D, as many as the largest gap at least. They have the dtype of the tensors, unless these differ:
            a list of one dtype is converted as a whole.
    """
    pads = {gap: zeros[:gap] for gap in set(gaps)}
    pieces: list[Tensor] = [zeros] * (2 * len(tensors))
    pieces[0::2] = tensors
    pieces[1::2] = map(pads.__getitem__, gaps)
    torch.cat(pieces, out=out)


def takes_grads(slot: Tensor) -> bool:
    """True where gradients had better be gathered, multiplied and looked at in one go, by whatever means there are."""
    return slot.device.type == "cpu" and slot.dtype in FLOATS


def unscale_grads(grads: list[Tensor], inv_scale: float, found_inf: Tensor | None) -> None:
    """Multiply ``grads``, all of one device and dtype, by ``inv_scale``.

    Args:
        grads: Dense tensors, or all of them placed.
        inv_scale: 1 / loss scale.
        found_inf: float32, one element; set to 1 where a gradient is not finite. None: do not look.
    """
    if not grads or (inv_scale == 1.0 and found_inf is None):
        return
    if is_placed(grads[0]):
        assert extension is not None
        for placed in grads:
            # Asked of the norm first, which is quicker, and is finite where they are, but for overflow of its own.
            if inv_scale != 1.0 or not math.isfinite(norm(placed)):
                extension.scale_placed_grads(placed, inv_scale, found_inf)
        return
    # Subclasses may have no memory but that of tensors inside (DTensor); torch's own ops know what to do with them.
    plain = all(type(grad) is Tensor for grad in grads)
    if plain and inv_scale == 1.0 and found_inf is not None and found_inf.device.type == "cpu":
        if not all(map(_is_finite, grads)):
            found_inf.fill_(1.0)
    elif plain and gathers_in_one_pass(grads[0]) and all(grad.is_contiguous() for grad in grads):
        assert extension is not None
        extension.gather_cpu(grads, grads, inv_scale, found_inf)
    elif found_inf is not None:
        # One pass that multiplies and looks at every element; where it need not multiply, it still is the fewest calls.
        factor = torch.full((1,), inv_scale, dtype=torch.float32, device=found_inf.device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
    else:
        torch._foreach_mul_(grads, inv_scale)


def divides_in_update(device: torch.device) -> bool:
    """True where an update with a ``grad_scale`` needs no more launches, or passes over memory, than one without."""
    return device.type != "npu"


def is_placed(grads: Tensor) -> bool:
    """True for an operand that stands for gradients wherever they lie: only ops can read it, it has no memory."""
    return extension is not None and bool(extension.is_placed(grads))


def multiply_(grads: Tensor, factor: Tensor) -> None:
    """``grads.mul_(factor)``, of a dense tensor or a placed one, with one number on their device."""
    if is_placed(grads):
        assert extension is not None
        extension.scale_placed_grads(grads, factor.to(grads.dtype).item(), None)
    else:
        grads.mul_(factor.to(grads.dtype))


def _is_finite(grad: Tensor) -> bool:
    """True where every element is finite: quickly told by the norm, unless that alone is too large for its dtype."""
    if extension is None and grad.dtype not in LOW_PRECISION and math.isfinite(torch.linalg.vector_norm(grad)):
        return True  # one call for all of it
    return math.isfinite(norm(grad.reshape(-1))) or bool(grad.isfinite().all())
