# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Norm and clipping of gradients in flat buffers, in one pass over each, for ``distributed.clip_grad_norm_``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.fusion.flat_grads import FlatGrads
from apex_npu.fusion.grad_slots import IN_BUFFER, InPlace
from apex_npu.ops import clip_coefficient as coefficient_of
from apex_npu.ops import is_grad_list, multiply_, norm, norm_to_clip, wide_dtype


def multiply_grads_(flats: Sequence[FlatGrads], grads: Sequence[Tensor], total: Tensor, coefficient: Tensor) -> None:
    """Multiply ``grads``, whose norm is ``total``, by ``coefficient``. They include the gradients of ``flats``."""
    if total.device.type == "cpu" and coefficient == 1.0:
        return  # multiplying would change nothing
    for grad in grads:
        multiply_(grad, coefficient.to(grad.device))
    if all(map(is_grad_list, grads)):
        return  # no padding is written
    # 0 times a nan coefficient leaves nan in the padding. On a CPU the check is free.
    if total.device.type != "cpu" or coefficient.isnan():
        for flat in flats:
            flat.memory.clear_padding()


def clip_coefficient(norm: Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Return the 0-dim factor that clips gradients of this norm.

    Raises:
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
    """
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients is non-finite ({norm.item()}), so it cannot be "
            "clipped. To scale with it anyway, set error_if_nonfinite=False"
        )
    return coefficient_of(norm, max_norm)


def grad_operands(
    flats: Sequence[FlatGrads], unfused: Sequence[Tensor], norm_type: float, in_place: InPlace
) -> list[Tensor]:
    """Return all gradients in few pieces."""
    found: list[Tensor] = []
    for flat in flats:
        if norm_type == 2.0:
            found += flat.operands(in_place)
        elif norm_type > 0:  # zeros in the padding add nothing; other "norms" count tensors or look for the smallest
            found += flat.operands(InPlace.NO)
        else:
            found += [view for view, state in zip(flat.views, flat.gather(), strict=True) if state == IN_BUFFER]
    return found + [p.grad.detach() for p in unfused if p.grad is not None]


def norm_of(grads: Sequence[Tensor], norm_type: float, found_inf: Tensor | None = None) -> Tensor:
    """Return the norm of all ``grads`` together, 0-dim; for ``found_inf`` see ``ops.norm``."""
    norm_type = float(norm_type)
    # A gradient without elements has neither a largest nor a smallest one.
    grads = [grad for grad in grads if grad.numel() or 0 <= norm_type < math.inf]
    if not grads:
        return torch.tensor(0.0)
    norms = [_norm(grad, norm_type, found_inf) for grad in grads]
    if len(norms) == 1 and norm_type != 0.0:  # norm 0 counts tensors
        return norms[0]
    device, dtype = norms[0].device, max((n.dtype for n in norms), key=lambda d: d.itemsize)
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device, dtype) for n in norms]), norm_type)
    return total


def norm_and_coefficient(
    grads: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> tuple[Tensor, Tensor]:
    """Return the results of ``norm_of`` and ``clip_coefficient``."""
    if len(grads) == 1 and not error_if_nonfinite and _is_flat(grads[0], norm_type):
        return norm_to_clip(grads[0], max_norm)
    total = norm_of(grads, norm_type)
    return total, clip_coefficient(total, max_norm, norm_type, error_if_nonfinite)


def _is_flat(grad: Tensor, norm_type: float) -> bool:
    return norm_type == 2.0 and grad.dim() == 1 and (is_grad_list(grad) or grad.is_contiguous())


def _norm(grad: Tensor, norm_type: float, found_inf: Tensor | None) -> Tensor:
    if found_inf is not None:
        return norm(grad.reshape(-1), found_inf)
    total: Tensor = (
        norm(grad)
        if _is_flat(grad, norm_type)
        else torch.linalg.vector_norm(grad, norm_type, dtype=wide_dtype(grad.dtype))
    )
    return total
