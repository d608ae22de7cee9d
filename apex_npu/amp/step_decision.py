# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The outcome of a step: scale_loss makes a ``StepDecision``, and ``amp.last_step`` returns a ``StepReport``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class StepDecision(NamedTuple):
    """The decision of a scale_loss block about the step that follows it."""

    skip: bool
    loss_id: int
    scale_before: float
    scale_after: float


@dataclass(frozen=True)
class StepReport:
    """The outcome of one call of ``optimizer.step()`` under amp.

    Attributes:
        applied: False: the step was skipped because a gradient was inf or nan.
        loss_id: The loss that decided the outcome; None if no scale_loss came before the step.
        scale_before: The scale of that loss in the backward before the step.
        scale_after: The scale of that loss after the decision.
        skipped_steps: Number of steps of this optimizer skipped so far.
        skips_in_a_row: Number of consecutive steps skipped up to this one; 0 if this step was applied.

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


# The report of a step with ``enabled=False``, where amp decides nothing.
APPLIED = StepReport(True, None, None, None, 0, 0)
