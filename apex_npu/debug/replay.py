# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Replayer``: runs a skipped step once more, from what its forwards were called with, and watches it then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from apex_npu.amp.step_decision import StepReport
from apex_npu.debug.causes import Finding, name_of
from apex_npu.debug.finder import Finder, Gradients, params_of, stepped
from apex_npu.debug.forwards import Forward, Forwards, NotReplayedError
from apex_npu.debug.overflow_report import OverflowReport, Overflows
from apex_npu.distributed import local_part
from apex_npu.fusion import grads_of


class Run(NamedTuple):
    """One forward of a block, and the gradients that backward has passed to its outputs, by their number."""

    forward: Forward
    gradients: dict[int, Tensor]


@dataclass(eq=False)
class Block:
    """A ``scale_loss`` block whose gradients no step has taken yet.

    Attributes:
        loss_id: Its arguments.
        loss: Likewise, without its graph.
        optimizers: Likewise.
        scale: The loss scale.
        dynamic: It moves.
        params: What the optimizers step.
        sources: What backward gives gradients to, for each.
        runs: In the order of backward.
    """

    loss_id: int
    loss: Tensor
    optimizers: list[Optimizer]
    scale: float
    dynamic: bool
    params: list[Tensor]
    sources: list[Tensor]
    runs: list[Run] = field(default_factory=list)


class Replayer:
    """Keeps what the forwards since the last step were called with."""

    def __init__(self) -> None:
        """Of no model so far."""
        self._forwards = Forwards(self._gradient_arrived)
        self._pending: list[Block] = []
        self._block: Block | None = None
        self._hook: Any = None

    # ---- what is kept ----------------------------------------------------------------------------------------------

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Keep the forwards of ``models``, and of no others."""
        self._forwards.follow(models)
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._stepped)

    def end(self) -> None:
        """Keep nothing."""
        self._forwards.end()
        self._pending, self._block = [], None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def block_begins(self, loss: Tensor, optimizers: Any, loss_id: int, scale: float, dynamic: bool) -> None:
        """A block begins."""
        params, sources = params_of(optimizers)
        block = Block(loss_id, loss.detach(), stepped(optimizers), scale, dynamic, params, sources)
        if not any(grad is not None for grad in [*grads_of(sources), *grads_of(params)]):  # they have been cleared
            self._drop(block.optimizers)
        self._block = block

    def backward_ended(self) -> None:
        """Its gradients are there."""
        if self._block is not None:
            self._pending.append(self._block)

    def block_ended(self) -> None:
        """It has ended, after an exception, too."""
        self._block = None

    def _gradient_arrived(self, forward: Forward, i: int, gradient: Tensor) -> None:
        block = self._block
        if block is None:
            return
        run = next((run for run in block.runs if run.forward is forward and i not in run.gradients), None)
        if run is None:
            run = Run(forward, {})
            block.runs.append(run)
        run.gradients[i] = gradient

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._drop([optimizer])

    def _drop(self, optimizers: Sequence[Optimizer]) -> list[Block]:
        """Keep no blocks of ``optimizers``; returns those that were kept."""
        theirs = [block for block in self._pending if any(one is o for one in block.optimizers for o in optimizers)]
        self._pending = [block for block in self._pending if block not in theirs]
        return theirs

    # ---- what is run again -----------------------------------------------------------------------------------------

    def take(self, skip: StepReport) -> list[Block]:
        """The blocks whose gradients the skipped step was to take; they are not kept any longer."""
        return self._drop([o for block in self._pending if block.loss_id == skip.loss_id for o in block.optimizers])

    def explain(self, blocks: Sequence[Block], skip: StepReport) -> list[OverflowReport]:
        """Run the forwards and backwards of the ``blocks`` of a skipped step again; a report for each of them."""
        reports: list[OverflowReport] = []
        totals: dict[Tensor, Tensor] = {}
        for block in blocks:
            report = OverflowReport(loss_id=block.loss_id, scale=block.scale)
            reports.append(report)
            with torch.no_grad():
                report.loss = float(block.loss) if block.loss.numel() == 1 else None
                try:
                    self._replay(block, report, totals)
                except (
                    NotReplayedError,
                    RuntimeError,
                    NotImplementedError,
                    TypeError,
                    ValueError,
                    MemoryError,
                ) as error:
                    reason = str(error).splitlines()[0] if str(error) else repr(error)
                    report.notes.append(f"the step could not be run again: {reason}")
        for report in reversed(reports):
            if report.loss_id == skip.loss_id:
                report.scale_after, report.skips_in_a_row = skip.scale_after, skip.skips_in_a_row
                break
        if reports and not any(report.notes for report in reports):
            with torch.no_grad():
                reports[-1].notes.append(_compared(blocks, totals))
        return reports

    def _replay(self, block: Block, report: OverflowReport, totals: dict[Tensor, Tensor]) -> None:
        if not block.runs:
            raise NotReplayedError(
                "no forward was seen whose outputs have got gradients in the block. Call the model itself, "
                "model(input), rather than a method of it; pass the compiled model where it is compiled"
            )
        for run in block.runs:
            reason = run.forward.why_not()
            if reason is not None:
                raise NotReplayedError(reason)
        after: list[Finding] = []
        sums: dict[Tensor, Tensor] = {}
        for run in block.runs:
            found = OverflowReport(scale=block.scale)
            finder, gradients = self._run(block, run, found)
            for source, gradient in gradients:
                for total in (sums, totals):
                    total[source] = gradient if source not in total else total[source] + gradient
            is_after = any(cause.kind == "unknown" and cause.operator == "none" for cause in found.causes)
            if is_after:
                after += found.causes
            elif not report.causes:
                report.causes = found.causes
            for why, count in found.not_measured.items():
                report.not_measured[why] = report.not_measured.get(why, 0) + count
            report.operators += found.operators
        operators = report.operators
        finder.count(report, list(sums.items()))
        report.operators = operators
        report.causes = report.causes or after[:1] or [_of_sum(name) for name in list(report.parameters)[:1]]

    def _run(self, block: Block, run: Run, found: OverflowReport) -> tuple[Finder, Gradients]:
        """Run one forward and its backward again, with ``found`` as what is found; returns the gradients, too."""
        # Those of other models are reached through the arguments, whose graph is gone.
        own = {id(param) for param in run.forward.module.parameters() if param.requires_grad}
        sources = [source for source in block.sources if id(source) in own]
        given = list(run.gradients.values())
        with run.forward.as_it_was() as call:
            finder = Finder(self._forwards.models)
            finder.dynamic, watch = block.dynamic, finder.watch
            watch.scale, watch.replayed = block.scale, run.forward
            watch.flag.take()
            was_raised, watch.flag.raised = watch.flag.raised, False
            watch.attach()
            try:
                outputs = call()
                _check_outputs(outputs, run)
                ends, inputs = [outputs[i] for i in run.gradients], [*sources, *run.forward.inputs]
                grads = torch.autograd.grad(ends, inputs, given, allow_unused=True)
                watch.suspended = True
                with torch.no_grad():
                    pairs = [(s, g) for s, g in zip(inputs, grads, strict=True) if g is not None]
                    is_bad = watch.ranges.is_at_limit if watch.saturates else watch.ranges.is_bad
                    bad = [gradient for gradient in given if is_bad(gradient)]
                    begins_in_forward = bool(bad) or watch.saturates or not bool(block.loss.isfinite().all())
                    finder.examine(found, ends if begins_in_forward else [], pairs)
                    is_forward = any(cause.phase == "forward" for cause in found.causes)
                    if bad and not is_forward:
                        found.causes = [_after_model(bad[0])]
            finally:
                watch.flag.read()
                watch.flag.raised = was_raised
                watch.detach()
        return finder, [(source, gradient) for source, gradient in pairs if id(source) in own]


def _check_outputs(outputs: Sequence[Tensor], run: Run) -> None:
    shapes = [outputs[i].shape if i < len(outputs) else None for i in run.gradients]
    if shapes != [gradient.shape for gradient in run.gradients.values()]:
        raise NotReplayedError("the model returns other outputs than it did: it depends on more than its arguments")


def _after_model(gradient: Tensor) -> Finding:
    return Finding(
        "unknown",
        "backward",
        None,
        "none",
        dtype=name_of(gradient.dtype),
        shape=tuple(gradient.shape),
        tensor="the gradient of an output",
        why="the models' outputs are finite, the gradients that backward passes to them are not: this begins in the "
        "code that computes the loss from them, which is not run again",
        advice="watch an iteration: find_overflow without replay; or let a module compute the loss, and pass it to "
        "find_overflow, too",
    )


def _of_sum(parameter: str) -> Finding:
    return Finding(
        "accumulation",
        "backward",
        parameter.rpartition(".")[0],
        "aten::add_",
        tensor=parameter,
        why="the gradients of each forward are finite, their sum is not",
        advice="divide each loss by the number of backward passes that are accumulated, or use O1, whose gradients are "
        "float32, or O5",
    )


def _compared(blocks: Sequence[Block], totals: dict[Tensor, Tensor]) -> str:
    """Whether the gradients of the replay are those that the skipped step has left."""
    same, bad_now, bad_again = True, 0, 0
    seen: set[Tensor] = set()
    for block in blocks:
        for param, source in zip(block.params, block.sources, strict=True):
            grad = source.grad if param.grad is None else param.grad
            if source in seen or (grad is None and source not in totals):
                continue
            seen.add(source)
            now = None if grad is None else local_part(grad)
            again = totals.get(source)
            bad_now += now is not None and not bool(now.isfinite().all())
            bad_again += again is not None and not bool(again.isfinite().all())
            same &= now is not None and again is not None and _are_same(now, local_part(again), block.scale)
    if same:
        return "run again, with the random numbers and buffers of then: the gradients are the same, bit for bit"
    if not bad_again:
        return (
            "run again, its gradients are finite: the cause is in other processes, in gradients from before, in a "
            "state that the model keeps outside of its buffers, or in a part of the loss that is not computed from its "
            "outputs. Watch an iteration: find_overflow without replay"
        )
    return (
        f"run again, {bad_again} gradients are not finite, as {bad_now} after the skipped step, which may have been "
        "clipped, averaged or added to since"
    )


def _are_same(now: Tensor, again: Tensor, scale: float) -> bool:
    """Whether ``now`` is ``again``, unscaled or not."""
    now, again = now.float(), again.float()
    return any(
        now.shape == scaled.shape and bool(((now == scaled) | (now.isnan() & scaled.isnan())).all())
        for scaled in (again, again * (1.0 / scale))
    )


class ReplayFinder:
    """An observer of amp that has skipped steps run again, and keeps what is found.

    Attributes:
        found: The reports.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Of ``models``."""
        self.found = Overflows("no step was skipped")
        self._replayer = Replayer()
        self._models = list(models)

    def attach(self) -> None:
        """Begin."""
        self._replayer.follow(self._models)

    def detach(self) -> None:
        """End."""
        self._replayer.end()

    def block_begins(self, loss: Tensor, optimizers: Any, loss_id: int, scale: float, dynamic: bool) -> None:
        """See ``Observer``."""
        self._replayer.block_begins(loss, optimizers, loss_id, scale, dynamic)

    def backward_ended(self) -> None:
        """See ``Observer``."""
        self._replayer.backward_ended()

    def block_ended(self) -> None:
        """See ``Observer``."""
        self._replayer.block_ended()

    def step_skipped(self, report: StepReport) -> None:
        """See ``Observer``."""
        self.found.reports += self._replayer.explain(self._replayer.take(report), report)
