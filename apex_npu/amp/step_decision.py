# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The outcome of a step: ``StepDecision`` is what scale_loss decides, ``StepReport`` what ``amp.last_step`` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class StepDecision(NamedTuple):
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

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> with amp.scale_loss(loss_fn(model(input), target), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> amp.last_step(optimizer).applied
        True
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


# Of a step with ``enabled=False``, where amp decides nothing.
APPLIED = StepReport(True, None, None, None, 0, 0)
