# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""With ``fuse_unscale`` gradients are held, multiplied with the loss scale, until ``step`` divides and clips them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.optimizer_record import OptimizerRecord
from apex_npu.fusion import FlatGrads, clip_coefficient, total_grad_norm


def hand_over_scale(optimizer: Optimizer, record: OptimizerRecord) -> None:
    """Have held gradients divided by their scale: in the step itself, where the optimizer can."""
    units = record.units(optimizer)
    if record.held_scale == 1.0 or not units:
        return
    scale = torch.full((1,), record.held_scale, dtype=torch.float32, device=units[0].device)
    if record.clip_coefficient is not None:
        scale /= record.clip_coefficient.to(scale.device)
    record.held_scale, record.clip_coefficient = 1.0, None
    if getattr(optimizer, "is_npu_fused_optimizer", False):
        optimizer.grad_scale_of_step = scale  # type: ignore[attr-defined]
        return
    factor = scale.reciprocal()
    with torch.no_grad():
        for unit in units:
            for grad in [p.grad for p in unit.params if p.grad is not None]:
                grad.mul_(factor.to(grad.device, grad.dtype))


def clip_at_step(
    record: OptimizerRecord,
    flats: list[FlatGrads],
    loose: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Leave it to the next step to clip; the arguments and the norm are those of ``clip_grad_norm_``."""
    norm = total_grad_norm(flats, loose, norm_type)
    if norm_type != 0:  # which counts, whatever the scale
        norm = norm / record.held_scale
    before = record.clip_coefficient
    if before is not None and norm_type != 0:
        norm = norm * before.to(norm.device).squeeze()
    coefficient = clip_coefficient(norm, max_norm, norm_type, error_if_nonfinite).float().reshape(1)
    record.clip_coefficient = coefficient if before is None else coefficient * before.to(coefficient.device)
    return norm
