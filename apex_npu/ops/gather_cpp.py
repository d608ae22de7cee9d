# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``gather.py`` has two implementations of, by the C++ extension (csrc/fused_optim); torch does the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu import _C
from apex_npu._C import take_grads_cpu as take_grads_
from apex_npu.ops import gather_cuda, gather_torch
from apex_npu.ops.grad_lists import is_grad_list
from apex_npu.ops.reference import FLOATS
from apex_npu.ops.segmented import norm

__all__ = [
    "gather_",
    "gathers_in_one_pass",
    "multiply_",
    "take_grads_",
    "unscale_grads",
]


def gathers_in_one_pass(slot: Tensor) -> bool:
    """See ``gather_torch``."""
    return slot.device.type == "cpu" and slot.dtype in FLOATS


@torch.no_grad()
def gather_(
    slots: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: float = 1.0, found_inf: Tensor | None = None
) -> None:
    """See ``gather_torch``."""
    if slots and gathers_in_one_pass(slots[0]) and all(grad.dtype in FLOATS for grad in grads):
        _C.gather_cpu(slots, grads, inv_scale, found_inf)
    else:
        gather_torch.gather_(slots, grads, inv_scale, found_inf)


def unscale_grads(grads: list[Tensor], inv_scale: float, found_inf: Tensor | None) -> None:
    """See ``gather_torch``."""
    if not grads or (inv_scale == 1.0 and found_inf is None):
        return
    if is_grad_list(grads[0]):
        for listed in grads:
            if listed.device.type != "cpu":
                gather_cuda.scale_listed(listed, inv_scale, found_inf)
            # The norm is checked first, which is quicker: it is finite where they are, unless it overflows itself.
            elif inv_scale != 1.0 or not math.isfinite(norm(listed)):
                _C.scale_grad_list(listed, inv_scale, found_inf)
    # Subclasses may have no memory but that of tensors inside (DTensor).
    elif (
        inv_scale != 1.0
        and gathers_in_one_pass(grads[0])
        and all(type(g) is Tensor and g.is_contiguous() for g in grads)
    ):
        _C.gather_cpu(grads, grads, inv_scale, found_inf)
    else:
        gather_torch.unscale_grads(grads, inv_scale, found_inf)


def multiply_(grads: Tensor, factor: Tensor) -> None:
    """See ``gather_torch``."""
    if is_grad_list(grads) and grads.device.type != "cpu":
        gather_cuda.scale_listed(grads, factor.to(grads.dtype))
    elif is_grad_list(grads):
        _C.scale_grad_list(grads, factor.to(grads.dtype).item(), None)
    else:
        gather_torch.multiply_(grads, factor)
