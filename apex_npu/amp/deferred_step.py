# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a step does that blocks have left something to: to divide gradients, to clip them, or to skip by itself.

With ``fuse_unscale`` gradients stay multiplied with the loss scale until then. Where gradients have overflowed, some
devices skip the step, and the host reads ``found_inf`` later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from apex_npu.amp.deferred_inf_check import Deferral, DeferredInfCheck
from apex_npu.amp.grad_groups import GradGroup, found_inf_flags
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.session import current
from apex_npu.amp.step_decision import StepReport
from apex_npu.backends import number_on
from apex_npu.fusion import FlatGrads, HasFusedGroups, clip_coefficient, total_grad_norm
from apex_npu.ops import divides_in_update, joins_lists, masks_writes


def supports_found_inf(optimizer: Optimizer) -> bool:
    """True where a number on the device can make ``optimizer`` write nothing, and that is cheap."""
    # A hook is not to be called for a step that is skipped.
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    if any(hooks) or not isinstance(optimizer, HasFusedGroups):
        return False
    if not optimizer.steps_by_rule_alone():  # type: ignore[attr-defined]
        return False
    device: torch.device | None = optimizer.skips_on()  # type: ignore[attr-defined]
    # Elsewhere all that is written would have to be cloned, which takes longer than a wait.
    return device is not None and masks_writes(device)


def check_for_device(optimizer: Optimizer, state: AmpOptimizerState) -> DeferredInfCheck | None:
    """The check that decides about the step that comes now, where that can be left to the device; else None."""
    check = None if state.deferral is None else state.deferral.device_check
    if check is None or not supports_found_inf(optimizer):
        return None
    if state.decision is not None and state.decision.skip:
        return None  # by an earlier block
    session, last = current(), state.report
    # The step that may raise the alarm: what has overflowed is looked for in gradients that are still there.
    skips = 1 + (0 if last is None else last.skips_in_a_row)
    return check if session is None or skips != session.skip_alarm else None


def report_later(state: AmpOptimizerState, check: DeferredInfCheck) -> None:
    """Record that the device has taken or skipped the step, and report which when the check is resolved."""
    deferral = deferral_of(state)
    deferral.skipped_check, deferral.check = check, None
    state.stage = Stage.READY
    stepped = weakref.ref(state)  # the session has the check, and must not keep an optimizer alive

    def report() -> None:
        state = stepped()
        if state is not None and state.deferral is not None:
            state.deferral.skipped_check = None
            ended = state.end_step()
            if ended.skipped:
                say_skipped(ended)

    check.add_done_callback(report)


def say_skipped(report: StepReport) -> None:
    """Tell the user that a step was skipped."""
    session = current()
    if session is not None:
        session.say(
            f"Gradient overflow.  Skipping step, loss scaler {report.loss_id} reducing loss scale to "
            f"{report.scale_after}"
        )
        if session.observer is not None:
            session.observer.step_skipped(report)


def holds(state: AmpOptimizerState) -> bool:
    """The next step has to divide gradients by the loss scale, or to clip them."""
    deferral = state.deferral
    return state.policy.fuse_unscale and (
        state.grad_scale != 1.0 or (deferral is not None and deferral.clip_coefficient is not None)
    )


def take_step(
    optimizer: Optimizer, state: AmpOptimizerState, check: DeferredInfCheck | None, step: Callable[[], Any]
) -> Any:
    """Call ``step`` with what has been left to it.

    Args:
        optimizer: Whose step it is.
        state: The scale of its gradients, and how they are clipped.
        check: By which the device skips the step; None: it is to be taken.
        step: Its own.

    Returns:
        What it returns.
    """
    handed: Any = optimizer
    # They stand on the optimizer during its step alone, and no interrupt comes before they are deleted.
    handed.grad_scale = handed.found_inf = None
    try:
        handed_over = set_grad_scale(optimizer, state)
        if check is not None:
            handed.found_inf = check.start()
        result = step()
    finally:
        del handed.grad_scale, handed.found_inf
    if handed_over and not isinstance(optimizer, HasFusedGroups):  # torch's kernels write the unscaled gradients back
        state.grad_scale, deferral_of(state).clip_coefficient = 1.0, None
    return result


def divide_before_step(optimizer: Optimizer, state: AmpOptimizerState) -> None:
    """Where the step would need separate launches to divide gradients, divide them with the check for overflow."""
    deferral = deferral_of(state)
    if deferral.check is None or deferral.clip_coefficient is not None or not holds(state):
        return
    groups = state.grad_groups(optimizer)
    if any(divides_in_update(group.device) for group in groups):
        return

    def look() -> list[Tensor]:
        flags = _scale_and_look(groups, 1.0 / state.grad_scale)
        state.grad_scale = 1.0
        return flags

    deferral.resolve(look=look)


def set_grad_scale(optimizer: Optimizer, state: AmpOptimizerState) -> bool:
    """Have gradients divided by their scale, and clipped: in the step itself, where the optimizer can.

    Returns:
        True where the step finds the scale on the optimizer, as torch.amp.GradScaler hands it over.
    """
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    fuses = isinstance(optimizer, HasFusedGroups)
    # Code of the script reads them.
    are_read = bool(optimizer._optimizer_step_pre_hooks) or getattr(optimizer, "reads_param_grads", False)
    if not fuses or are_read:
        state.grads.materialize()
    if not holds(state):
        return False
    coefficient = deferral_of(state).clip_coefficient
    if first is None or are_read or not _takes_grad_scale(optimizer, first.device):
        unscale_now_(state, state.grad_groups(optimizer))
        return False
    if coefficient is None and fuses and not divides_in_update(first.device):
        unscale_now_(state, state.grad_groups(optimizer))
        return False
    there = first.device if coefficient is None else coefficient.device
    scale = torch.full((1,), state.grad_scale, dtype=torch.float32, device=there)
    if coefficient is not None:
        scale /= coefficient
    optimizer.grad_scale = number_on(scale, first.device)  # type: ignore[attr-defined]
    return True


def _takes_grad_scale(optimizer: Optimizer, device: torch.device) -> bool:
    """True for optimizers that read ``grad_scale``: those of this package, and torch's with ``fused=True``."""
    if isinstance(optimizer, HasFusedGroups):
        return True
    # torch_npu's fused AdamW reads neither scale nor flag.
    return device.type != "npu" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def unscale_now_(state: AmpOptimizerState, groups: list[GradGroup]) -> None:
    """Divide gradients by their scale, and clip them, now rather than in the step."""
    _gather_joined(groups)
    clip_now(state, groups)
    if state.policy.fuse_unscale:
        for group in groups:
            group.scale_(1.0 / state.grad_scale)
        state.grad_scale = 1.0


def clip_now(state: AmpOptimizerState, groups: list[GradGroup]) -> None:
    """Clip now what was to be clipped by the next step: gradients to come have no part in it."""
    deferral = state.deferral
    if deferral is not None and deferral.clip_coefficient is not None:
        coefficient, deferral.clip_coefficient = deferral.clip_coefficient, None
        for group in groups:
            group.clip_(coefficient)


def clip_at_step(
    state: AmpOptimizerState,
    flats: list[FlatGrads],
    unfused: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Leave it to the next step to clip; the arguments and the norm are those of ``clip_grad_norm_``."""
    deferral = deferral_of(state)
    check = deferral.device_check
    if check is not None:
        norm = _checked_norm(check, flats, unfused, norm_type)
    else:
        norm = total_grad_norm(flats, unfused, norm_type)
    device = norm.device
    if deferral.check is not None and check is None and norm_type > 0:  # others pass over inf and NaN
        norm = norm.cpu()  # the one wait of the step; what follows from it is cheaper on the host
        deferral.resolve(norm)
    if norm_type != 0:  # which counts, whatever the scale
        norm = norm / state.grad_scale
    before = deferral.clip_coefficient
    if before is not None and norm_type != 0:
        norm = norm * number_on(before, norm.device).squeeze()
    coefficient = clip_coefficient(norm, max_norm, norm_type, error_if_nonfinite).float().reshape(1)
    deferral.clip_coefficient = coefficient if before is None else coefficient * number_on(before, coefficient.device)
    return number_on(norm, device)


def _checked_norm(check: DeferredInfCheck, flats: list[FlatGrads], unfused: list[Tensor], norm_type: float) -> Tensor:
    """The norm, with a look for overflow that the host does not wait for."""
    if norm_type != 2.0 or check.flag is not None:
        if norm_type > 0:  # others pass over inf and NaN, which are looked for later
            check.start()
        return total_grad_norm(flats, unfused, norm_type)
    device = next(t.device for t in (*(flat.flat for flat in flats), *unfused))
    found_inf = torch.zeros(1, dtype=torch.float32, device=device)
    norm = total_grad_norm(flats, unfused, norm_type, found_inf)
    check.start(found_inf)
    return norm


def _gather_joined(groups: Sequence[GradGroup]) -> None:
    """Where gradients are gathered anyway, gather all: one that cannot be raises before any has been written."""
    for group in groups:
        if group.flat is not None and joins_lists(group.device):
            group.flat.gather()


def _scale_and_look(groups: Sequence[GradGroup], factor: float) -> list[Tensor]:
    """``look_for_overflow``, while the gradients are multiplied by ``factor``."""
    _gather_joined(groups)
    flags = found_inf_flags(groups)
    for group in groups:
        group.scale_(factor, flags[group.device])
    return list(flags.values())


def deferral_of(state: AmpOptimizerState) -> Deferral:
    """Of an optimizer that has one."""
    assert state.deferral is not None
    return state.deferral
