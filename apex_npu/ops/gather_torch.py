# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Multiplies and checks gradients by torch's operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from apex_npu.ops.reference import LOW_PRECISION
from apex_npu.ops.segmented import norm


def unscale_grads(grads: list[Tensor], inv_scale: float, found_inf: Tensor | None) -> None:
    """Do what ``gather.unscale_grads`` does, for dense tensors."""
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
