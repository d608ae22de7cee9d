# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``find_overflow``: watches an iteration, and tells why its gradients are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex_npu.amp.optimizer_state import adopted_inside, inner_optimizer, state_of
from apex_npu.amp.session import Session, current
from apex_npu.amp.step_decision import StepReport
from apex_npu.backends import for_device
from apex_npu.debug.calls import Leaf
from apex_npu.debug.causes import OF_ANOTHER_PROCESS, Finding, Scale, find_causes, name_of
from apex_npu.debug.observers import leave, observe
from apex_npu.debug.opening import check_models, models_to_watch
from apex_npu.debug.operators import is_measurable
from apex_npu.debug.overflow_report import OverflowReport, Overflows, note_of_dropped
from apex_npu.debug.places import Names
from apex_npu.debug.watch import Watch
from apex_npu.distributed import local_part
from apex_npu.distributed.torch_ddp import ddps_of


class Finder:
    """An observer of amp that watches operators, and makes a report of each block.

    Attributes:
        found: The reports.
        watch: What sees the operators.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Of ``models``, whose names the reports have."""
        self.found = Overflows()
        self._models = list(models)
        params = [p for model in models for p in model.parameters()]
        devices = [d for d in dict.fromkeys(p.device for p in params) if d.type != "meta" and for_device(d).saturates()]
        self.watch = Watch(Names(models), devices)
        self._loss: Tensor | None = None
        self._sources: list[Tensor] = []
        self._report: OverflowReport | None = None
        self._dynamic = False

    # ---- what amp calls --------------------------------------------------------------------------------------------

    def block_begins(self, loss: Tensor, optimizers: Any, loss_id: int, scale: float, dynamic: bool) -> None:
        """See ``Observer``."""
        listed = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self._sources = []
        params: list[Tensor] = []
        for optimizer in map(inner_optimizer, map(adopted_inside, listed)):
            state = state_of(optimizer)
            for group in [] if state is None else state.grad_groups(optimizer):
                self._sources += group.sources
                params += group.params
        self._loss, self._dynamic = loss.detach(), dynamic
        self._report = OverflowReport(loss_id=loss_id, scale=scale)
        self._note_scale(loss_id, scale)
        gradients = []
        for i, (param, source) in enumerate(zip(params, self._sources, strict=True)):
            name = self._name_of(i, source)
            gradients += [(name, grad) for grad in (param.grad, source.grad) if grad is not None]
        self.watch.begin_block(scale, gradients)

    def backward_ended(self) -> None:
        """See ``Observer``."""
        report = self._report
        if report is None or self._loss is None:
            return
        self.watch.suspended = True
        with torch.no_grad():
            if self._loss.numel() == 1:
                report.loss = float(self._loss)
            self._examine(report, self._loss, self._sources)
        self.found.reports.append(report)
        self.watch.flag.hand_back()

    def block_ended(self) -> None:
        """See ``Observer``."""
        report = self._report
        if report is not None and all(known is not report for known in self.found.reports):
            self.watch.suspended = True
            self.examine_interrupted(report)
        self.watch.end_block([source.grad for source in self._sources if source.grad is not None])
        self._loss, self._report, self._sources = None, None, []
        self.watch.suspended = False

    def step_skipped(self, report: StepReport) -> None:
        """See ``Observer``."""
        of_loss = [known for known in reversed(self.found.reports) if known.loss_id == report.loss_id]
        decider = next((known for known in of_loss if known.scale == report.scale_before), None)
        if decider is not None:
            decider.scale_after, decider.skips_in_a_row = report.scale_after, report.skips_in_a_row
        session = current()
        for loss_id in {known.loss_id for known in self.found.reports if known.scale_after is None}:
            if session is not None and loss_id is not None:  # of blocks after the one that has decided
                self._note_scale(loss_id, session.scaler(loss_id).scale)

    def _note_scale(self, loss_id: int, scale: float) -> None:
        """The last block of a loss has left ``scale``."""
        known = next((known for known in reversed(self.found.reports) if known.loss_id == loss_id), None)
        if known is not None and known.scale_after is None and scale < known.scale:
            known.scale_after = scale

    # ---- what is found ---------------------------------------------------------------------------------------------

    def examine_without_block(self) -> None:
        """Make a report of the gradients that are there, where amp has had no block."""
        report, params = OverflowReport(), [p for model in self._models for p in model.parameters()]
        if any(p.grad is not None for p in params):
            with torch.no_grad():
                self._examine(report, None, params)
            self.found.reports.append(report)

    def examine_interrupted(self, report: OverflowReport) -> None:
        """Make ``report`` of the last result that was not finite, where an exception came before the gradients."""
        told = max((known.operators for known in self.found.reports), default=0)
        last = [call for call in self.watch.bad[-1:] if call.index >= told]
        if last:
            report.operators = self.watch.calls
            with torch.no_grad():
                report.causes = find_causes(self.watch, last, Scale(report.scale, self._dynamic))
            report.notes.append(
                "an exception has ended the iteration: this is about the last result that is not finite"
            )
            self.found.reports.append(report)

    def _name_of(self, i: int, source: Tensor) -> str:
        return self.watch.names.of_tensor(source) or f"parameter {i} of shape {list(source.shape)}"

    def _examine(self, report: OverflowReport, loss: Tensor | None, sources: Sequence[Tensor]) -> None:
        watch = self.watch
        present = [(source, local_part(source.grad)) for source in sources if source.grad is not None]
        grads = [(source, grad) for source, grad in present if is_measurable(grad)]
        ranges = watch.ranges.of([grad for _, grad in grads])
        bad = [pair for pair, ends in zip(grads, ranges, strict=True) if not all(map(math.isfinite, ends))]
        report.gradients, report.operators = len(grads), watch.calls
        for i, (source, grad) in enumerate(bad):
            report.parameters[self._name_of(i, source)] = (int(grad.isnan().sum()), int(grad.isinf().sum()))
        bad_loss = loss is not None and loss.numel() > 0 and watch.ranges.is_bad(loss)
        starts = [loss] if bad_loss and loss is not None else [grad for _, grad in bad]
        if watch.saturates:  # where what has overflowed is finite
            starts = [*([] if loss is None else [loss]), *(grad for _, grad in grads)]
        targets = list(dict.fromkeys(call for tensor in starts for call in watch.bad_writers(tensor)))
        scale = Scale(report.scale, self._dynamic)
        report.causes = find_causes(watch, targets, scale)
        if watch.flag.raised and not report.causes:
            report.causes = find_causes(watch, watch.bad or watch.constants, scale)
        if watch.saturates and len(report.causes) > 1:
            report.notes.append(f"{len(report.causes) - 1} more operators have saturated; the first is shown")
            report.causes = report.causes[:1]
        if not report.causes and bad_loss and loss is not None:
            report.causes = [_of_loss(watch.leaf(loss))]
        elif not report.causes and bad:
            report.causes = [_of_unseen(bad[0][0], watch)]
        if _are_averaged(sources):
            report.causes = [_of_average(cause) for cause in report.causes]
        report.not_measured = dict(watch.not_measured) if report.overflowed else {}
        if watch.dropped_bad:
            report.notes.append(note_of_dropped(watch.dropped_bad))


def _of_loss(leaf: Leaf) -> Finding:
    return Finding(
        "data",
        "forward",
        None,
        "none",
        dtype=name_of(leaf.dtype),
        shape=leaf.shape,
        tensor="the loss",
        why="the loss was not finite before it was watched, or was computed by code that is not seen",
        advice="open find_overflow before the forward that the loss comes from",
    )


def _of_unseen(source: Tensor, watch: Watch) -> Finding:
    return Finding(
        "written",
        "block",
        None,
        "none",
        dtype=name_of(source.dtype),
        shape=tuple(source.shape),
        tensor=watch.names.of_tensor(source),
        why="no operator that was watched has written this gradient: it was finite, or from before",
        advice="look at code of the block that writes gradients, and at gradients that were not cleared",
    )


def _are_averaged(sources: Sequence[Tensor]) -> bool:
    session = current()
    if session is None or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return session.data_parallel is not None or bool(ddps_of(session.ddps, sources))


def _of_average(cause: Finding) -> Finding:
    """``cause``, or where it is about a gradient that DistributedDataParallel has written: that of another process."""
    if cause.phase != "block" or cause.file is not None or cause.kind not in ("data", "written"):
        return cause
    why, advice = OF_ANOTHER_PROCESS
    return replace(cause, kind="ranks", tensor=None, why=why, advice=advice)


class find_overflow:
    """A context that finds out why the steps of the iterations inside of it are skipped.

    Every operator of forward and backward is looked at, which takes two to three times as long as the iteration alone;
    what the iteration computes, and which steps are skipped, does not change. ``print(found)`` has for each cause the
    operator, the module, the line of code, the reason, and what to do.

    Args:
        models: Those whose modules and parameters are named; by default those that were passed to ``amp.initialize``.

    Returns:
        From ``with``: an ``Overflows`` with ``causes``, ``parameters``, ``loss``, ``scale``, ``reports`` and
        ``to_json(path)``.

    Raises:
        TypeError: One of ``models`` is no module.
        ValueError: No model is given, and amp has none; or another ``find_overflow`` is open.
        RuntimeError: A CUDA graph is being captured, whose operators the host cannot look at.

    Example::

        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        >>> with amp.debug.find_overflow(model) as found:
        ...     loss = model(torch.randn(8, 4) * 1e6).mean()
        ...     with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...         scaled_loss.backward()
        ...     optimizer.step()
        >>> found.causes[0].kind
        'overflow'
    """

    def __init__(self, *models: nn.Module) -> None:
        """Check the models."""
        check_models("find_overflow", models)
        self._models = models
        self._finder: Finder | None = None
        self._session: Session | None = None

    def __enter__(self) -> Overflows:
        open_already = "find_overflow is open already: it covers all that runs inside of it; leave this one out"
        finder = self._finder = Finder(models_to_watch("find_overflow", self._models, open_already))
        session = self._session = current()
        if session is not None:
            observe(session, finder)
        finder.watch.attach()
        return finder.found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        finder, session = self._finder, self._session
        if finder is None:
            return
        finder.watch.detach()
        if session is not None:
            leave(session, finder)
        if not finder.found.reports:
            finder.examine_without_block()
        if kind is not None and not finder.found.causes:
            finder.examine_interrupted(OverflowReport())
        self._finder = self._session = None
