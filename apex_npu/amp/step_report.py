# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What became of a step: ``Verdict`` is what scale_loss decides, ``StepReport`` what ``amp.last_step`` tells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """What a scale_loss block has decided about the step that follows it."""

    skip: bool
    loss_id: int
    scale_before: float
    scale_after: float


@dataclass(frozen=True)
class StepReport:
    """How one call of ``optimizer.step()`` under amp ended.

    Attributes:
        applied: False: it was skipped, because a gradient was inf or nan.
        loss_id: The loss that decided it; None where no scale_loss came before the step.
        scale_before: That loss's scale in the backward before the step.
        scale_after: Its scale from then on.
        skipped_steps: Steps of this optimizer that have been skipped so far.
        skips_in_a_row: How many of those were the last ones; 0 where this step was applied.
    """

    applied: bool
    loss_id: int | None
    scale_before: float | None
    scale_after: float | None
    skipped_steps: int
    skips_in_a_row: int

    @property
    def skipped(self) -> bool:
        """The opposite of ``applied``."""
        return not self.applied


def next_report(verdict: Verdict | None, former: StepReport | None) -> StepReport:
    """The report of a step that ends as ``verdict`` says, after one that ended as ``former`` says."""
    skip = verdict is not None and verdict.skip
    return StepReport(
        applied=not skip,
        loss_id=None if verdict is None else verdict.loss_id,
        scale_before=None if verdict is None else verdict.scale_before,
        scale_after=None if verdict is None else verdict.scale_after,
        skipped_steps=(0 if former is None else former.skipped_steps) + skip,
        skips_in_a_row=0 if not skip else 1 + (0 if former is None else former.skips_in_a_row),
    )


def explain_skips(report: StepReport, named_grads: Iterable[tuple[str, Tensor]]) -> str:
    """What to look at after many skipped steps; reads the gradients, which waits for the device.

    Args:
        report: Of the last of them.
        named_grads: Gradients as the overflow has left them, with their parameters' names.
    """
    named = [(name, grad) for name, grad in named_grads if grad.is_floating_point() and grad.numel()]
    finite = [bool(grad.isfinite().all()) for _, grad in named]
    bad = [name for (name, _), fine in zip(named, finite, strict=True) if not fine]
    if bad and len(bad) == len(named):
        where = f"the gradients of all {len(bad)} parameters are not finite, so look at the loss itself"
    elif bad:
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        where = f"not finite are the gradients of {shown}; all others are, so look at these layers"
    else:
        where = "the gradients are finite by now; look at the loss itself"
    return (
        f"{report.skips_in_a_row} steps in a row have been skipped, because gradients held inf or nan; the scale of "
        f"loss {report.loss_id} is down to {report.scale_after}. Of the last backward {where}: a logarithm, root or "
        "division at 0, a learning rate that has already ruined the weights, nan in the data. To find the operation, "
        "run one step at opt_level='O0' under torch.autograd.set_detect_anomaly(True)"
    )
