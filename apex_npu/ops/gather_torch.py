# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``gather.py`` has two implementations of, in pure torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.ops.reference import LOW_PRECISION
from apex_npu.ops.segmented import norm


def gathers_in_one_pass(slot: Tensor) -> bool:
    """True where ``gather_`` copies, widens, multiplies and checks every element in one pass."""
    return False


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
    raise NotImplementedError("take_grads_ needs the C++ extension; where gathers_in_one_pass() is False use gather_")


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
    slots = list(slots)
    torch._foreach_copy_(slots, list(grads))
    unscale_grads(slots, inv_scale, found_inf)


def unscale_grads(grads: list[Tensor], inv_scale: float, found_inf: Tensor | None) -> None:
    """Multiply ``grads``, all of one device and dtype, by ``inv_scale``.

    Args:
        grads: Dense tensors, or all of them lists of gradients.
        inv_scale: 1 / loss scale.
        found_inf: float32, one element; set to 1 where a gradient is not finite. None: do not look.
    """
    if not grads or (inv_scale == 1.0 and found_inf is None):
        return
    if grads[0].is_complex():
        grads = [as_real(grad) for grad in grads]
    # Subclasses may have no memory but that of tensors inside (DTensor); torch's own ops handle them.
    plain = all(type(grad) is Tensor for grad in grads)
    if plain and inv_scale == 1.0 and found_inf is not None and found_inf.device.type == "cpu":
        if not all(map(_is_finite, grads)):
            found_inf.fill_(1.0)
    elif found_inf is not None and plain and _checks_by_norms(grads[0]):
        _look(grads, found_inf)
        if inv_scale != 1.0:
            torch._foreach_mul_(grads, inv_scale)
    elif found_inf is not None:
        # One pass that multiplies and checks every element; where it need not multiply, it still is the fewest calls.
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, _factor_beside(found_inf, inv_scale))
    else:
        torch._foreach_mul_(grads, inv_scale)


def _factor_beside(found_inf: Tensor, inv_scale: float) -> Tensor:
    """``inv_scale`` on the device of ``found_inf``, made once for it: what waits for the flag waits for this, too."""
    known: tuple[float, Tensor] | None = vars(found_inf).get("factor")
    if known is None or known[0] != inv_scale:
        # Without dimensions, as GradScaler's: chips that saturate multiply a gradient of that shape in place by it.
        factor = torch.full((), inv_scale, dtype=torch.float32, device=found_inf.device)
        known = vars(found_inf)["factor"] = inv_scale, factor
    return known[1]


def as_real(tensor: Tensor) -> Tensor:
    """A view of the numbers that complex ones consist of, or of their conjugates."""
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def multiply_(grads: Tensor, factor: Tensor) -> None:
    """``grads.mul_(factor)``, of a dense tensor or a list of gradients, with one number on their device."""
    grads.mul_(factor.to(grads.dtype))


def _checks_by_norms(grad: Tensor) -> bool:
    """True where torch's kernel cannot: that of cuda has no bfloat16, and takes large float64 numbers for inf."""
    return grad.is_cuda and grad.dtype not in {torch.float32, torch.float16}


def _look(grads: list[Tensor], found_inf: Tensor) -> None:
    """Set ``found_inf`` where an element is not finite, without a wait: by the largest of each, in its own dtype."""
    filled = [grad for grad in grads if grad.numel()]
    if filled:
        largest = torch.stack(torch._foreach_norm(filled, math.inf))
        # inf and nan, less themselves, are nan, which is true.
        found_inf.logical_or_((largest - largest).any())


def _is_finite(grad: Tensor) -> bool:
    """True where every element is finite: by the norm, which is fast, unless that alone is too large for its dtype."""
    if grad.dtype not in LOW_PRECISION and math.isfinite(torch.linalg.vector_norm(grad)):
        return True
    return math.isfinite(norm(grad.reshape(-1))) or bool(grad.isfinite().all())
