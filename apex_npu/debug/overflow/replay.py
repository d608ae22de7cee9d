# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Replayer``: runs a skipped step again from the inputs of its forwards, and watches it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from apex_npu.amp import StepReport
from apex_npu.amp.inspect import Observer, at_end, gradients, parameters, stepped
from apex_npu.backends._torch_private import without_modes
from apex_npu.debug.model_report.copies import nodes_of
from apex_npu.debug.overflow.causes import DIVIDE_LOSSES, Finding, without_operator
from apex_npu.debug.overflow.finder import Finder, Gradients
from apex_npu.debug.overflow.forwards import Forward, Forwards, outputs_of
from apex_npu.debug.overflow.report import OverflowReport, Overflows, note_skip
from apex_npu.debug.text import described
from apex_npu.debug.watching.calls import NotReplayedError
from apex_npu.debug.watching.operators import gradient_values
from apex_npu.debug.watching.stream import Stream
from apex_npu.debug.watching.trail import GIVEN

# The maximum number of blocks over which gradients may be accumulated.
_MOST_BLOCKS = 256
NO_FORWARD = (
    "no forward was kept whose outputs received gradients in the block. Only calls of the model itself, "
    "model(input), are kept, if they begin inside the context, are not compiled as a whole by torch.compile or "
    "torch.jit, and return tensors in lists, tuples, dicts or dataclasses"
)


# One forward of a block, and the gradients that backward has passed to its outputs, by output index.
Run: TypeAlias = tuple[Forward, dict[int, Tensor]]


@dataclass(eq=False)
class Block:
    """A ``scale_loss`` block whose gradients no step has taken yet, with its ``runs`` in the order of backward."""

    loss_id: int
    loss: Tensor
    optimizers: list[Optimizer]
    scale: float
    dynamic: bool
    runs: list[Run] = field(default_factory=list)


class Replayer(Observer):
    """An observer of amp that keeps the inputs of the forwards since the last step, and runs these again.

    Attributes:
        found: The reports of the skipped steps that ``step_skipped`` has been called for.
    """

    def __init__(self) -> None:
        """Create a replayer that follows no model yet."""
        self.found = Overflows("no step was skipped while this was open")
        self._forwards = Forwards(self._gradient_arrived)
        self._pending: list[Block] = []
        self._block: Block | None = None
        self._taken: tuple[Any, ...] | None = None
        self._hook: Any = None

    # ---- what is kept ----------------------------------------------------------------------------------------------

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Keep the forwards of ``models``, and of no others."""
        self._forwards.follow(models)
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._stepped)
            known = weakref.ref(self)
            at_end(lambda: replayer.detach() if (replayer := known()) is not None else None)

    def detach(self) -> None:
        """Stop keeping forwards, and release those of blocks; others live as long as the graph of their outputs."""
        self._forwards.end()
        self.release(self._pending)
        self._pending, self._block, self._taken = [], None, None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def block_begins(self, loss: Tensor, optimizers: Any, loss_id: int, scale: float, dynamic: bool) -> None:
        self._forwards.close_interrupted()
        self._block = Block(loss_id, loss.detach(), stepped(optimizers), scale, dynamic)

    def backward_ended(self) -> None:
        if self._block is not None:
            self._pending.append(self._block)
            if len(self._pending) > _MOST_BLOCKS:
                self.release([self._pending.pop(0)])

    def block_ended(self) -> None:
        self._block = None

    def _gradient_arrived(self, forward: Forward, i: int, gradient: Tensor) -> None:
        block = self._block
        if block is None:
            return
        known = (given for kept, given in block.runs if kept is forward and i not in given)
        given = next(known, None)
        if given is None:
            given = {}
            block.runs.append((forward, given))
        given[i] = gradient

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.release(self._drop([optimizer]))

    def _drop(self, optimizers: Sequence[Optimizer]) -> list[Block]:
        """Remove the blocks of ``optimizers`` from those that are kept, and return them."""
        theirs = [block for block in self._pending if any(one is o for one in block.optimizers for o in optimizers)]
        self._pending = [block for block in self._pending if block not in theirs]
        return theirs

    def release(self, blocks: Sequence[Block]) -> None:
        """Release all that is kept of ``blocks``."""
        for block in blocks:
            for forward, _ in block.runs:
                forward.release()

    # ---- what is run again -----------------------------------------------------------------------------------------

    def step_skipped(self, report: StepReport) -> None:
        self.found.reports += self.explain(self.take(report) or [], report)

    def take(self, skip: StepReport) -> list[Block] | None:
        """Remove and return the blocks of a skipped step; None if another optimizer of theirs has done so before."""
        blocks = self._drop([o for block in self._pending if block.loss_id == skip.loss_id for o in block.optimizers])
        which = skip.loss_id, skip.scale_before, skip.scale_after
        if not blocks and self._taken == which:
            return None
        self._taken = which
        return blocks

    def explain_pending(self, optimizers: Any) -> list[OverflowReport]:
        """Call ``explain`` for the blocks whose bad gradients the next step of ``optimizers`` will still take."""
        blocks = self._drop(stepped(optimizers))
        return self.explain(blocks, StepReport(True, None, None, None, 0, 0)) if blocks else []

    def explain(self, blocks: Sequence[Block], skip: StepReport) -> list[OverflowReport]:
        """Run the forwards and backwards of the ``blocks`` of a skipped step again; return a report for each block."""
        totals: dict[Tensor, Tensor] = {}
        reproduced: bool | None = None
        with torch.no_grad(), Stream.none_watches(), without_modes():
            losses = [float(block.loss) if block.loss.numel() == 1 else None for block in blocks]
            reports = [OverflowReport(b.loss_id, loss, b.scale) for b, loss in zip(blocks, losses, strict=True)]
            try:
                for block, report in zip(blocks, reports, strict=True):
                    self._replay(block, report, totals)
                note, reproduced = _compared(blocks, totals)
            except Exception as error:
                reason = str(error) if isinstance(error, NotReplayedError) else described(error)
                note = f"the step could not be run again: {reason}"
        if reports:
            next((report for report in reports if report.overflowed), reports[-1]).notes.append(note)
        for report in reports:
            report.reproduced = reproduced
        note_skip(reports, skip)
        self.release(blocks)
        return reports

    def _replay(self, block: Block, report: OverflowReport, totals: dict[Tensor, Tensor]) -> None:
        if not block.runs:
            failed = self._forwards.failed
            raise NotReplayedError(NO_FORWARD if failed is None else f"its forward could not be kept: {failed}")
        for forward, _ in block.runs:
            forward.check_repeatable()
        causes: list[tuple[int, Finding]] = []
        notes: list[str] = []
        sums: dict[Tensor, Tensor] = {}
        for forward, given in block.runs:
            found = OverflowReport(scale=block.scale)
            finder, gradients = self._run(block, forward, given, found)
            for source, gradient in gradients:
                for total in (sums, totals):
                    total[source] = gradient if source not in total else total[source] + gradient
            causes += [(forward.number, cause) for cause in found.causes]
            notes += found.notes
            for why, count in found.not_measured.items():
                report.not_measured[why] = report.not_measured.get(why, 0) + count
            report.operators += found.operators
        finder.count(report, list(sums.items()))
        report.notes += dict.fromkeys(notes)
        report.causes = _of_one_forward(causes) or [_of_sum(name) for name in list(report.parameters)[:1]]

    def _run(
        self, block: Block, forward: Forward, recorded: dict[int, Tensor], found: OverflowReport
    ) -> tuple[Finder, Gradients]:
        """Run one forward and its backward again, and fill ``found``; return the finder and the gradients."""
        sources = [param for param in parameters(block.optimizers) if param.requires_grad]
        with forward.as_it_was() as (call, inputs), self._forwards.paused():
            finder = Finder(self._forwards.models)
            finder.dynamic, stream, overflows = block.dynamic, finder.stream, finder.trail.overflows
            stream.scale, stream.is_replay, stream.caller = block.scale, True, forward.place
            overflows.read()
            was_raised, overflows.raised = overflows.raised, False
            stream.attach()
            try:
                outputs = outputs_of(call())
                gradients = [*sources, *inputs]
                given = _begin_backward(outputs, recorded)
                grads = torch.autograd.grad(
                    [output for output, _ in given], gradients, [grad for _, grad in given], allow_unused=True
                )
                stream.suspended = True
                with torch.no_grad():
                    pairs = [(s, g) for s, g in zip(gradients, grads, strict=True) if g is not None]
                    _examine(finder, found, block, outputs, [grad for _, grad in given], pairs)
            finally:
                stream.suspended = True
                overflows.read()
                overflows.raised = was_raised
                stream.detach()
        known = {id(source) for source in sources}
        return finder, [(source, gradient) for source, gradient in pairs if id(source) in known]


def _of_one_forward(causes: Sequence[tuple[int, Finding]]) -> list[Finding]:
    """Return the causes of the first bad forward, or else of the first bad backward; the others follow from them.

    The outputs of an earlier model are arguments of a later one, whose backward runs first.
    """
    forward = [(number, cause) for number, cause in causes if cause.phase == "forward"]
    named = [(number, cause) for number, cause in causes if cause.operator != "none"]
    chosen = min(number for number, _ in forward) if forward else next((number for number, _ in named or causes), None)
    return [cause for number, cause in forward or named or causes if number == chosen]


def _begin_backward(outputs: Sequence[Tensor], gradients: dict[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs where backward begins, and their gradients.

    An output that others are computed from, such as logits of a loss, receives its gradient during backward. A hook
    then replaces it with the recorded one, which includes what the script has added.
    """
    if max(gradients) >= len(outputs):
        raise NotReplayedError("the model returns other outputs than before")
    pairs = [(outputs[i], gradient) for i, gradient in gradients.items()]
    graphs: list[Any] = [output.grad_fn for output, _ in pairs]
    before = [nodes_of(node for node, _ in graph.next_functions if node is not None) for graph in graphs]
    given = []
    for output, gradient in pairs:
        if any(output.grad_fn in nodes for nodes in before):

            def settle(arrived: Tensor, recorded: Tensor = gradient) -> Tensor | None:
                with Stream.none_watches():
                    is_same = arrived.dtype == recorded.dtype and _are_equal(arrived, recorded)
                return None if is_same else recorded

            output.register_hook(settle)
        else:
            given.append((output, gradient))
    return given


def _examine(
    finder: Finder,
    found: OverflowReport,
    block: Block,
    outputs: Sequence[Tensor],
    given: Sequence[Tensor],
    gradients: Gradients,
) -> None:
    bad = list(filter(finder.trail.is_bad, given))
    begins_in_forward = bool(bad) or finder.trail.overflows.saturates or not bool(block.loss.isfinite().all())
    finder.examine(found, outputs if begins_in_forward else [], gradients)
    is_given = [c.kind == "data" and c.phase == "backward" and c.tensor == GIVEN for c in found.causes]
    is_forward = any(cause.phase == "forward" for cause in found.causes)
    if (bad and not is_forward) or (is_given and all(is_given)):
        gradient = next(iter(bad or given))
        found.causes = [without_operator("unknown", "backward", gradient, "the gradient of an output", *_AFTER_MODEL)]


_AFTER_MODEL = (
    "the models' outputs are finite, but the gradients that backward passes to them are not: the fault is in the "
    "code that computes the loss from them, which is not run again",
    "watch an iteration with find_overflow without replay; or let a module compute the loss, and pass this module "
    "to find_overflow, too",
)


def _of_sum(parameter: str) -> Finding:
    return Finding(
        kind="accumulation",
        phase="backward",
        module=parameter.rpartition(".")[0],
        operator="aten::add_",
        tensor=parameter,
        why="the gradients of each forward are finite, their sum is not",
        advice=DIVIDE_LOSSES,
    )


def _compared(blocks: Sequence[Block], totals: dict[Tensor, Tensor]) -> tuple[str, bool]:
    """Compare the gradients with those of the skipped step; return a note, and whether they reproduce its cause."""
    is_same, is_bad_alike, is_told, bad = True, True, False, 0
    left = {param: (grad, block.scale) for block in blocks for param, grad, _ in gradients(block.optimizers)}
    for param, (grad, scale) in left.items():
        again = totals.get(param)
        if grad is None or again is None:
            is_same &= grad is again
            is_bad_alike &= all(one is None or bool(gradient_values(one).isfinite().all()) for one in (grad, again))
            continue
        now, again = gradient_values(grad).float(), gradient_values(again).float()
        bad += not bool(again.isfinite().all())
        is_bad_alike &= torch.equal(now.isfinite(), again.isfinite())
        is_same &= any(_are_equal(now, scaled) for scaled in (again, again * (1.0 / scale)))
        is_told |= not bool(again.isnan().all())
    if not bad:
        return (
            "run again, its gradients are finite: the cause is in other processes, in gradients from before, in a "
            "state that is not kept, or in what the loss is computed from besides the models' outputs. Watch an "
            "iteration: find_overflow without replay"
        ), False
    if is_same:
        same = "its gradients are the same, bit for bit" if is_told else "all of its gradients are nan, as they were"
    elif is_bad_alike:
        same = "the same elements of its gradients are not finite; others were clipped, averaged or added to since"
    else:
        same = (
            "other elements of its gradients are not finite than in the skipped step: these were clipped, averaged or "
            "added to since, or the causes above are not all. Watch an iteration: find_overflow without replay"
        )
    return f"run again as it was, {same}", is_same or is_bad_alike


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
