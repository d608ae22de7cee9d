# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Finder``: watches an iteration, and reports why its gradients are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu.amp import StepReport
from apex_npu.amp.inspect import Observer, are_averaged, gradients, loss_scale, optimizers, stepped
from apex_npu.debug.overflow.causes import SENTENCES, Finding, Kind, Scale, find_causes, without_operator
from apex_npu.debug.overflow.report import OverflowReport, Overflows, note_skip
from apex_npu.debug.text import name_of
from apex_npu.debug.watching.operators import count_bad, followed, gradient_values, is_finite, vanishing_number_in
from apex_npu.debug.watching.trail import Trail
from apex_npu.ops import LOW_PRECISION

_OF_STATIC_SCALE = (
    "look at the iterations before: under a static loss scale steps are applied whatever their gradients are. "
    'loss_scale="dynamic" skips such steps, so that their cause is found; explain_overflows(replay=True), or --replay, '
    "finds it in the first of them"
)
# The phase, the reason and the advice where no operator is known.
_OF_WRITTEN = (
    "block",
    "no watched operator has made this gradient not finite: other code has written it, or it is from before",
    "look at the code of the block that writes gradients, and at gradients that were not cleared",
)
_OF_SPARSE = (
    "backward",
    "the gradient is sparse, and operators on sparse tensors are not examined",
    "run the step again with find_overflow(replay=True), or use sparse=False for an iteration",
)
# Pairs of a parameter and its gradient.
Gradients = list[tuple[Tensor, Tensor]]


def present(optimizers: Any) -> Gradients:
    """Return the gradients of ``optimizers`` that are not None; see ``amp.inspect.gradients``."""
    return [(param, grad) for param, grad, _ in gradients(optimizers) if grad is not None]


class Finder(Observer):
    """An observer of amp that watches operators, and makes a report of each block.

    Attributes:
        found: The reports.
        trail: The record of the operators that were watched.
        stream: The stream of these operators.
        dynamic: Whether the loss scale of the block is dynamic.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Create a finder that names the modules and parameters of ``models`` in its reports."""
        self.found = Overflows()
        self._models = list(models)
        self.trail = Trail(models)
        self.stream = self.trail.stream
        self._loss: Tensor | None = None
        self._optimizers: list[Optimizer] = []
        self._report: OverflowReport | None = None
        self.dynamic = False

    # ---- what amp calls --------------------------------------------------------------------------------------------

    def block_begins(self, loss: Tensor, optimizers: Any, loss_id: int, scale: float, dynamic: bool) -> None:
        self._optimizers = stepped(optimizers)
        self._loss, self.dynamic = loss.detach(), dynamic
        self._report = OverflowReport(loss_id=loss_id, scale=scale)
        self._note_scale(loss_id, scale)
        known = enumerate(present(self._optimizers))
        self.trail.begin_block(scale, [(self._name_of(i, param), grad) for i, (param, grad) in known])

    def backward_ended(self) -> None:
        report = self._report
        if report is None or self._loss is None:
            return
        self.stream.suspended = True
        with torch.no_grad():
            if self._loss.numel() == 1:
                report.loss = float(self._loss)
            self.examine(report, [self._loss], present(self._optimizers))
        self.found.reports.append(report)
        self.trail.overflows.hand_back()

    def block_ended(self) -> None:
        report = self._report
        if report is not None and all(known is not report for known in self.found.reports):
            self.stream.suspended = True
            self._examine_interrupted(report)
        self.trail.end_block([grad for _, grad in present(self._optimizers)])
        self._loss, self._report, self._optimizers = None, None, []
        self.stream.suspended = False

    def step_skipped(self, report: StepReport) -> None:
        note_skip(self.found.reports, report)
        for loss_id in {known.loss_id for known in self.found.reports if known.scale_after is None}:
            if loss_id is not None:  # this covers blocks after the deciding one
                self._note_scale(loss_id, loss_scale(loss_id))

    def _note_scale(self, loss_id: int, scale: float) -> None:
        """Record that the last block of a loss has left the loss scale at ``scale``."""
        known = next((known for known in reversed(self.found.reports) if known.loss_id == loss_id), None)
        if known is not None and known.scale_after is None and scale < known.scale:
            known.scale_after = scale

    # ---- what is found ---------------------------------------------------------------------------------------------

    def examine_rest(self, interrupted: bool) -> None:
        """Make a report of what no block has reported, also if an exception has ``interrupted`` the iteration."""
        params = [p for model in self._models for p in model.parameters()]
        gradients: Gradients = [(p, p.grad) for p in params if p.grad is not None]
        if gradients and not self.found.reports:  # there was no block
            report = OverflowReport()
            with torch.no_grad():
                self.examine(report, [], gradients)
            self.found.reports.append(report)
        if interrupted and not self.found.causes:
            self._examine_interrupted(OverflowReport())

    def _examine_interrupted(self, report: OverflowReport) -> None:
        """Fill ``report`` from the last result that was not finite, if an exception came before the gradients."""
        told = max((known.operators for known in self.found.reports), default=0)
        last = [call for call in list(self.trail.bad)[-1:] if call.index >= told]
        if last:
            report.operators = self.stream.calls
            with torch.no_grad():
                report.causes = find_causes(last, Scale(report.scale, self.dynamic))
            report.notes.append(
                "an exception has ended the iteration: this is about the last result that is not finite"
            )
            self.found.reports.append(report)

    def _name_of(self, i: int, source: Tensor) -> str:
        return self.trail.names.of_tensor(source) or f"parameter {i} of shape {list(source.shape)}"

    def count(self, report: OverflowReport, gradients: Gradients) -> tuple[Gradients, Gradients]:
        """Record in ``report`` which of ``gradients`` are not finite; return the readable ones, and the bad ones."""
        local = [followed(gradient_values(grad)) for _, grad in gradients]
        read = [(pair, values) for pair, values in zip(gradients, local, strict=True) if values is not None]
        ranges = self.trail.ranges_of([values for _, values in read])
        bad = [one for one, ends in zip(read, ranges, strict=True) if not is_finite(ends)]
        report.gradients = len(read)
        report.parameters = {self._name_of(i, pair[0]): count_bad(values) for i, (pair, values) in enumerate(bad)}
        return [pair for pair, _ in read], [pair for pair, _ in bad]

    def _advised(self, cause: Finding) -> Finding:
        """Add to ``cause``, weights that are not finite, what is known of the step that wrote them."""
        if (eps := _vanished_eps()) or self._loss is None or self.dynamic:
            return replace(cause, advice=eps + cause.advice)
        return replace(cause, advice=_OF_STATIC_SCALE)

    def examine(self, report: OverflowReport, results: Sequence[Tensor], gradients: Gradients) -> None:
        """Fill ``report`` from ``gradients`` and from ``results``, the final results of forward such as the loss."""
        trail, overflows = self.trail, self.trail.overflows
        grads, bad = self.count(report, gradients)
        report.operators = self.stream.calls
        bad_results = [result for result in results if result.numel() and not is_finite(trail.ranges_of([result])[0])]
        starts = bad_results or [grad for _, grad in bad]
        if overflows.saturates:  # overflowed values are finite there
            starts = [*results, *(grad for _, grad in grads)]
        targets = list(dict.fromkeys(call for tensor in starts for call in trail.bad_writers(tensor)))
        scale = Scale(report.scale, self.dynamic)
        report.causes = find_causes(targets, scale)
        report.causes = [self._advised(cause) if cause.kind == "weights" else cause for cause in report.causes]
        if overflows.raised and not report.causes:
            report.causes = find_causes(list(trail.bad) or overflows.constants, scale)
        if overflows.saturates and len(report.causes) > 1:
            report.notes.append(f"{len(report.causes) - 1} more operators have saturated; the first is shown")
            report.causes = report.causes[:1]
        if not report.causes and bad_results:
            why = "the loss was not finite before it was watched, or was computed by code that is not watched"
            advice = "open find_overflow before the forward that the loss comes from"
            report.causes = [without_operator("data", "forward", bad_results[0], "the loss", why, advice)]
        elif not report.causes and bad:
            source, grad = bad[0]
            kind: Kind = "written" if grad.layout == torch.strided else "unknown"
            phase, why, advice = _OF_SPARSE if kind == "unknown" else _OF_WRITTEN
            name = trail.names.of_tensor(source)
            report.causes = [without_operator(kind, phase, source, name, why, advice)]
        if are_averaged([source for source, _ in gradients]):
            report.causes = [_of_average(cause) for cause in report.causes]
        report.not_measured = dict(self.stream.not_measured) if report.overflowed else {}


def _vanished_eps() -> str:
    """Return the begin of an advice if an optimizer's eps is 0 in the dtype of its parameters, or an empty string."""
    for optimizer in optimizers():
        for group in optimizer.param_groups:
            dtypes = {p.dtype for p in group["params"] if p.dtype in LOW_PRECISION}
            for dtype in dtypes:
                if (eps := vanishing_number_in(group.get("eps"), dtype)) is not None:
                    return (
                        f"the eps of {type(optimizer).__name__}, {eps:g}, is 0 in {name_of(dtype)}, so that its "
                        "step divides by 0 where the second moment is 0: use eps=1e-4, or O2, whose masters are "
                        "float32. Otherwise "
                    )
    return ""


def _of_average(cause: Finding) -> Finding:
    """Return ``cause``, or a cause of kind ``"ranks"`` if DistributedDataParallel has written its gradient."""
    if cause.phase != "block" or cause.file is not None or cause.kind not in ("data", "written"):
        return cause
    why, advice = SENTENCES["ranks"]
    return replace(cause, kind="ranks", tensor=None, why=why, advice=advice)
