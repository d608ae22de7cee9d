# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps that the device skips where gradients have overflowed; the host reads ``found_inf`` later."""

from __future__ import annotations

import weakref

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from apex_npu.amp.deferred_inf_check import DeferredInfCheck
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.session import current
from apex_npu.amp.step_decision import StepReport
from apex_npu.fusion import HasFusedGroups
from apex_npu.ops import masks_writes


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
    assert state.deferral is not None
    state.deferral.skipped_check, state.deferral.check = check, None
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
