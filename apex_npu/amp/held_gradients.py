# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""With ``fuse_unscale`` gradients are held, multiplied with the loss scale, until ``step`` divides and clips them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.gradients import GradUnit, gather_joined, scale_and_look
from apex_npu.amp.open_check import OpenCheck
from apex_npu.amp.optimizer_record import OptimizerRecord, inner_optimizer, record_of
from apex_npu.amp.session import current
from apex_npu.backends import number_on
from apex_npu.fusion import FlatGrads, clip_coefficient, total_grad_norm
from apex_npu.ops import divides_in_update


class HoldsGradients(Protocol):
    """What is needed of an optimizer's record to end the holding."""

    held_scale: float
    clip_coefficient: Tensor | None


def check_unwrapped(optimizer: Any) -> None:
    """Refuse a wrapper, such as LARC, that works on gradients before the step: it would find them scaled.

    Raises:
        RuntimeError: ``optimizer`` is one.
    """
    if inner_optimizer(optimizer) is not optimizer:
        raise RuntimeError(
            f"{type(optimizer).__name__} works on gradients before step(), which with fuse_unscale=True are still "
            "multiplied with the loss scale then; leave fuse_unscale out"
        )


def check_unshared(optimizers: Sequence[Optimizer]) -> None:
    """Refuse a parameter that two optimizers step, of ``optimizers`` and of those that hold gradients now.

    Raises:
        RuntimeError: There is one.
    """
    session = current()
    adopted = [] if session is None else [o for o in session.adopted if o not in optimizers]
    holding = [o for o in adopted if (record := record_of(o)) is not None and record.holds]
    if len(holding) + len(optimizers) < 2:
        return
    owners: dict[int, Optimizer] = {}
    for optimizer in [*holding, *optimizers]:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            owner = owners.setdefault(id(param), optimizer)
            if owner is not optimizer:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} belongs to two optimizers, {type(owner).__name__} and "
                    f"{type(optimizer).__name__}: with fuse_unscale=True each would unscale its gradient; leave "
                    "fuse_unscale out"
                )


def divide_before_step(optimizer: Optimizer, record: OptimizerRecord) -> None:
    """Where the step would divide held gradients by launches of its own, have it done with the look for overflow."""
    check = record.open_check
    if check is None or record.clip_coefficient is not None or record.held_scale == 1.0:
        return
    units = record.units(optimizer)
    if any(divides_in_update(unit.device) for unit in units):
        return

    def look() -> list[Tensor]:
        flags = scale_and_look(units, 1.0 / record.held_scale)
        record.held_scale = 1.0
        return flags

    record.close_check(look=look)


def hand_over_scale(optimizer: Optimizer, record: OptimizerRecord) -> None:
    """Have held gradients divided by their scale: in the step itself, where the optimizer can."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    # A hook before the step is to see true gradients.
    if not getattr(optimizer, "is_npu_fused_optimizer", False) or optimizer._optimizer_step_pre_hooks or first is None:
        if record.holds:
            settle(record, record.units(optimizer))
        else:
            record.stop_sharing()
        return
    if not record.holds:
        return
    coefficient = record.clip_coefficient
    if coefficient is None and not divides_in_update(first.device):
        settle(record, record.units(optimizer))
        return
    there = first.device if coefficient is None else coefficient.device
    scale = torch.full((1,), record.held_scale, dtype=torch.float32, device=there)
    if coefficient is not None:
        scale /= coefficient
    optimizer.grad_scale_of_step = number_on(scale, first.device)  # type: ignore[attr-defined]


def finish_hand_over(optimizer: Optimizer) -> None:
    """After the step, or its failure: a scale, or a flag, that it did not come to take is not for the next one."""
    for name in ("grad_scale_of_step", "found_inf_of_step"):
        if getattr(optimizer, name, None) is not None:
            setattr(optimizer, name, None)


def settle(record: HoldsGradients, units: list[GradUnit]) -> None:
    """Divide held gradients by their scale, and clip them, now rather than in the step."""
    gather_joined(units)
    clip_held(record, units)
    for unit in units:
        unit.scale_params_(1.0 / record.held_scale)
    record.held_scale = 1.0


def clip_held(record: HoldsGradients, units: list[GradUnit]) -> None:
    """Clip now what was to be clipped by the next step: gradients to come have no part in it."""
    coefficient, record.clip_coefficient = record.clip_coefficient, None
    if coefficient is not None:
        for unit in units:
            unit.clip_params_(coefficient)


def _checked_norm(check: OpenCheck, flats: list[FlatGrads], loose: list[Tensor], norm_type: float) -> Tensor:
    """The norm, with a look for overflow that nobody waits for."""
    if norm_type != 2.0 or check.flag is not None:
        if norm_type > 0:  # others pass over inf and nan, and whoever looks for these comes later
            check.ask()
        return total_grad_norm(flats, loose, norm_type)
    device = next(t.device for t in (*(flat.flat for flat in flats), *loose))
    found_inf = torch.zeros(1, dtype=torch.float32, device=device)
    norm = total_grad_norm(flats, loose, norm_type, found_inf)
    check.ask(found_inf)
    return norm


def clip_at_step(
    record: OptimizerRecord,
    flats: list[FlatGrads],
    loose: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Leave it to the next step to clip; the arguments and the norm are those of ``clip_grad_norm_``."""
    check = record.check_on_device
    if check is not None:
        norm = _checked_norm(check, flats, loose, norm_type)
    else:
        norm = total_grad_norm(flats, loose, norm_type)
    device = norm.device
    if record.open_check is not None and check is None and norm_type > 0:  # others pass over inf and nan
        norm = norm.cpu()  # the one wait of the step; what follows from it is cheaper on the host
        record.close_check(norm)
    if norm_type != 0:  # which counts, whatever the scale
        norm = norm / record.held_scale
    before = record.clip_coefficient
    if before is not None and norm_type != 0:
        norm = norm * number_on(before, norm.device).squeeze()
    coefficient = clip_coefficient(norm, max_norm, norm_type, error_if_nonfinite).float().reshape(1)
    record.clip_coefficient = coefficient if before is None else coefficient * number_on(before, coefficient.device)
    return number_on(norm, device)
