# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps that the device skips by itself where gradients have overflowed, and of which the host hears later."""

from __future__ import annotations

import weakref

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from apex_npu.amp.open_check import OpenCheck
from apex_npu.amp.optimizer_record import OptimizerRecord
from apex_npu.amp.session import current
from apex_npu.amp.step_report import StepReport, next_report
from apex_npu.ops import masks_writes


def masks_steps(optimizer: Optimizer) -> bool:
    """True where ``optimizer`` can be told, by a number of its device, to write nothing, and that is cheap."""
    # A hook is not to be called for a step that is skipped.
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    if any(hooks) or not getattr(optimizer, "is_npu_fused_optimizer", False):
        return False
    if not optimizer.steps_by_rule_alone():  # type: ignore[attr-defined]
        return False
    device: torch.device | None = optimizer.skips_on()  # type: ignore[attr-defined]
    # Elsewhere it would take copies of all that is written, which cost more than a wait.
    return device is not None and masks_writes(device)


def check_to_delegate(optimizer: Optimizer, record: OptimizerRecord) -> OpenCheck | None:
    """What has yet to be decided about the step that comes now, where that can be left to the device; else None."""
    check = record.check_on_device
    if check is None or not masks_steps(optimizer):
        return None
    if record.verdict is not None and record.verdict.skip:
        return None  # by an earlier block
    session, last = current(), record.latest_report
    # The step that may raise the alarm: what has overflowed is looked for in gradients that are still there.
    skips = 1 + (0 if last is None else last.skips_in_a_row)
    return check if session is None or skips != session.skip_alarm else None


def hand_over_flag(optimizer: Optimizer, check: OpenCheck) -> None:
    """Have the step that comes now skipped where gradients have overflowed."""
    optimizer.found_inf_of_step = check.ask()  # type: ignore[attr-defined]


def report_later(record: OptimizerRecord, check: OpenCheck) -> None:
    """It has been taken, or not: what became of it is told when that is known."""
    record.delegated_check = check
    record.open_check = record.unchecked = None
    stepped = weakref.ref(record)  # the session has the check, and shall not keep an optimizer that nobody else has

    def report() -> None:
        record = stepped()
        if record is None:
            return
        record.delegated_check = None
        ended = report_step(record)
        if ended.skipped:
            say_skipped(ended)

    check.then(report)


def report_step(record: OptimizerRecord) -> StepReport:
    """Note that the last step has ended as the verdict says, which is not for another one."""
    record.latest_report = next_report(record.verdict, record.latest_report)
    record.verdict = None
    return record.latest_report


def say_skipped(report: StepReport) -> None:
    """Tell the user that a step was skipped."""
    session = current()
    if session is not None:
        session.say(
            f"Gradient overflow.  Skipping step, loss scaler {report.loss_id} reducing loss scale to "
            f"{report.scale_after}"
        )
