# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps that the device skips by itself where gradients have overflowed, and of which the host hears later."""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

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
    if not getattr(optimizer, "is_npu_fused_optimizer", False) or any(hooks):
        return False
    device: torch.device | None = optimizer.skips_on()  # type: ignore[attr-defined]
    # Elsewhere it would take copies of all that is written, which cost more than a wait.
    return device is not None and masks_writes(device)


def delegates(optimizer: Optimizer, record: OptimizerRecord) -> bool:
    """True where the step that comes now can be left to the device, which alone knows whether it is to be skipped."""
    if not record.device_decides or not masks_steps(optimizer):
        return False
    if record.verdict is not None and record.verdict.skip:
        return False  # by an earlier block
    session, last = current(), record.latest_report
    # The step that may raise the alarm: what has overflowed is looked for in gradients that are still there.
    return session is None or last is None or last.skips_in_a_row + 1 != session.skip_alarm


def hand_over_flag(optimizer: Optimizer, record: OptimizerRecord) -> None:
    """Have the step that comes now skipped where gradients have overflowed."""
    assert record.open_check is not None
    optimizer.found_inf_of_step = record.open_check.ask()  # type: ignore[attr-defined]


def report_later(record: OptimizerRecord) -> None:
    """It has been taken, or not: what became of it is told when that is known."""
    check = record.delegated_check = record.open_check
    assert check is not None
    record.open_check = record.unchecked = None

    def report() -> None:
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
