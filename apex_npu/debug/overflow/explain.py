# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``explain_overflows``: watches the next iteration after skipped steps, without changes to the script."""

from __future__ import annotations

import logging
import math
import sys
import textwrap
import time
from collections.abc import Sequence
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu.amp import StepReport, inspect
from apex_npu.backends import is_capturing
from apex_npu.backends._torch_private import dispatch_modes
from apex_npu.debug.overflow.causes import identity_of
from apex_npu.debug.overflow.finder import Finder, present
from apex_npu.debug.overflow.replay import NO_FORWARD, Replayer
from apex_npu.debug.overflow.report import OverflowReport
from apex_npu.debug.text import count
from apex_npu.debug.watching.operators import followed, gradient_values
from apex_npu.debug.watching.stream import on_forward
from apex_npu.distributed.rank_progress import LastRank, has_peers, store_for

logger = logging.getLogger("apex_npu.debug")

_LENGTH = 4096
_PATIENCE_SECONDS = 10.0
_INTERVAL_SECONDS = 0.05


class Explainer(inspect.Observer):
    """An observer of amp that watches an iteration after skipped steps, and logs the findings.

    It watches from the first forward after the skip until that iteration's step is skipped, or until the forward of the
    next iteration. With ``replay`` the skipped step itself is run again first; if that tells the cause, no other
    iteration is watched. An error while watching is logged and ends it; training goes on.
    """

    def __init__(self, after: float, times: int, *, once: bool = False, replay: bool = False) -> None:
        """Watch after ``after`` skips in a row, for at most ``times`` tables; ``once``: only one iteration."""
        self._after, self._left, self._once = after, times, once
        self._finder: Finder | None = None
        self._replayer = Replayer() if replay else None
        self._replays = replay
        self._start: Any = None
        self._error: BaseException | None = None
        self._rank, self._asks = LastRank(), True
        self._row = 0
        self._last: list[Any] = []
        self._repeated = 0
        self._optimizers: Any = None
        self._loss: Tensor | None = None
        self._is_dynamic = True
        self._undecided: list[tuple[Optimizer, StepReport | None]] = []
        self.blocks = self.skips = self.applied = self.tables = 0

    # ---- what amp calls --------------------------------------------------------------------------------------------

    def session_begins(self) -> None:
        if self._replayer is not None and inspect.policy() is not None:
            self._guarded(self._replayer.follow, inspect.models())

    def block_begins(self, loss: Tensor, optimizers: Any, loss_id: int, scale: float, dynamic: bool) -> None:
        self._error = sys.exc_info()[1]
        self._rank.update()
        self._guarded(self._settle)
        self._loss, self._optimizers, self._is_dynamic = loss.detach(), optimizers, dynamic
        for watching in self._watching():
            self._guarded(watching.block_begins, loss, optimizers, loss_id, scale, dynamic)

    def backward_ended(self) -> None:
        for watching in self._watching():
            self._guarded(watching.backward_ended)

    def block_ended(self) -> None:
        for watching in self._watching():
            self._guarded(watching.block_ended)
        if self._finder is not None and sys.exc_info()[1] is not self._error:  # an exception has ended the block
            self.end()
        if sys.exc_info()[1] is self._error and not is_capturing():
            self._guarded(self._look_at_block)

    def _watching(self) -> list[inspect.Observer]:
        return [watching for watching in (self._finder, self._replayer) if watching is not None]

    def _look_at_block(self) -> None:
        """Check whether the loss, or under a static scale a gradient, is bad although the step is not skipped."""
        self.blocks += 1
        is_bad = self._loss is not None and not bool(self._loss.isfinite().all())
        self._loss, self._undecided = None, []
        if not is_bad and not self._is_dynamic:
            values = (followed(gradient_values(grad)) for _, grad in present(self._optimizers))
            is_bad = not all(value is None or bool(value.isfinite().all()) for value in values)
        if not is_bad:
            self._row = 0
            return
        optimizers = inspect.stepped(self._optimizers)
        decisions = list(map(inspect.decision_of, optimizers))
        if not self._is_dynamic or not any(decision is None or decision.skip for decision in decisions):
            self._is_applied()
        elif None in decisions:  # a later block decides, or the device
            self._undecided = [(optimizer, inspect.report_of(optimizer)) for optimizer in optimizers]

    def _settle(self) -> None:
        """Check whether the undecided step of a bad block was applied."""
        ended = [now for optimizer, before in self._undecided if (now := inspect.report_of(optimizer)) is not before]
        if ended:
            self._undecided = []
            if any(report is not None and report.applied for report in ended):
                self._is_applied()

    def _is_applied(self) -> None:
        self.applied += 1
        self._row += 1
        finder, replayer = self._finder, self._replayer
        found = [] if finder is None else finder.found.reports
        is_due = self._row >= self._after and self._left != 0
        if is_due and replayer is not None and not any(report.overflowed for report in found):
            found = replayer.explain_pending(self._optimizers)
        if reports := [report for report in found if report.overflowed]:
            self.end()
            self._log("\n\n".join(map(str, reports)), reports)
        elif is_due:
            self.arm()

    def step_skipped(self, report: StepReport) -> None:
        finder = self._finder
        self.skips += 1
        self._undecided, self._row = [], 0
        if finder is not None:
            self._guarded(finder.step_skipped, report)
            self.end()
            self._guarded(self._tell, report, finder.found.reports)
        is_due = report.skips_in_a_row >= self._after and self._left != 0
        is_told, replayer = False, self._replayer
        if replayer is not None:
            kept = replayer.take(report)
            is_told = kept is None  # when another optimizer of the block has skipped its step
            if kept and is_due and finder is None and any(block.runs for block in kept):
                is_told = self._guarded(lambda: self._tell(report, replayer.explain(kept, report)))
            replayer.release(kept or [])
        if self._left == 0:
            self.close()
        elif is_due and not is_told:
            self.arm()

    def _tell(self, skip: StepReport, reports: Sequence[OverflowReport]) -> bool:
        """Log the explanation; return False if the cause is not known."""
        text, is_cause = self._explanation(skip, reports)
        if text:
            self._log(text, reports)
        return is_cause

    def _explanation(self, skip: StepReport, reports: Sequence[OverflowReport]) -> tuple[str, bool]:
        """Return the tables of this process, or of the processes with a cause, and whether they say where to look.

        Each process sends its own tables through the processes' rendezvous store; no collective is involved. If no
        other process answers within ten seconds, they are not asked again.
        """
        own = "\n\n".join(str(report) for report in reports if report.overflowed or report.notes)
        causes = [cause for report in reports for cause in report.causes]
        is_cause = any(
            c.operator != "none" for report in reports for c in report.causes if report.reproduced is not False
        )
        store = store_for("explain_overflows") if has_peers() else None
        if store is None:
            return own, is_cause
        # All processes skip the same steps: each has counted the same number, and all that watch have explained the
        # same.
        key = f"{store.add(str(dist.get_rank()), 1)}/{skip.loss_id}/{skip.skipped_steps}"
        if any(cause.kind != "ranks" for cause in causes):
            store.set(f"{key}/{dist.get_rank()}", f"{int(is_cause)}{own}"[:_LENGTH])
            return own, is_cause
        told = _ask_others(store, key) if self._asks else {}
        self._asks = bool(told)
        if not told:
            return own, False
        others = [f"rank {rank}\n{textwrap.indent(text[1:], '  ')}" for rank, text in told.items()]
        first = own or "the gradients of this process are finite; the step was skipped because of another process"
        return "\n\n".join([first, *others]), any(text[0] == "1" for text in told.values())

    def _log(self, text: str, reports: Sequence[OverflowReport]) -> None:
        """Log ``text``, or only count it if the causes are those of the previous table."""
        self._left -= 1
        causes = [identity_of(cause) for report in reports for cause in report.causes]
        if causes and causes == self._last:
            self._repeated += 1
            return
        self._log_repeated()
        self._last = causes
        self.tables += 1
        logger.warning("%s", text)

    def _log_repeated(self) -> None:
        if self._repeated:
            logger.warning("the cause above was found again in %s", count(self._repeated, "later iteration"))
        self._repeated = 0

    def close(self) -> None:
        """Stop watching and keeping."""
        self.end()
        self._log_repeated()
        if self._replayer is not None:
            self._replayer.detach()
            self._replayer = None

    def end_script(self) -> None:
        """Print a summary at the end of the script; processes that load data print nothing."""
        if inspect.settings.observer is not self:  # the script has ended or replaced it
            return
        self._guarded(self._settle)
        self.close()
        if not self._rank.rank and (self.blocks or parent_process() is None):
            print(f"--explain-overflows: {self._summary()}", file=sys.stderr, flush=True)

    def _summary(self) -> str:
        if not self.blocks:
            return "the script has ended, and no scale_loss block of amp has run in it"
        seen = f"{count(self.blocks, 'block')}, {count(self.skips, 'skipped step')}"
        if self.applied:
            seen += f", {count(self.applied, 'applied step')} with a loss or gradients that were not finite"
        if self.tables:
            return f"{seen}; {count(self.tables, 'table')} above"
        if not (self.skips or self.applied):
            return f"{seen}: all losses were finite, and nothing has overflowed"
        if self._replays and self._after == 1:
            return f"{seen}; none was explained: {NO_FORWARD}; and the iteration after it was finite"
        return (
            f"{seen}; none was explained: this needs {self._after} in a row, and a further iteration that is not "
            "finite. --explain-overflows=1 --replay explains the first skipped step itself"
        )

    # ---- when it watches -------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Watch from the next forward on."""
        if self._start is None:
            self._start = on_forward(self._forward_begins)

    def end(self) -> None:
        """Stop watching."""
        finder, self._finder = self._finder, None
        if finder is not None:
            finder.stream.detach()
        if self._start is not None:
            self._start.remove()
            self._start = None
        if self._once:
            inspect.leave(self)

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        # Operators are not watched within another mode, which might be left first, nor while a graph is captured.
        if self._finder is not None or dispatch_modes() or is_capturing():
            return
        if self in inspect.observers():
            self._guarded(self._begin, module, args)
        else:  # a later session, whose blocks and steps this observer does not see
            self.end()

    def _over(self) -> None:
        """Handle the end of the iteration that was watched."""
        self._guarded(self._settle)
        self.end()

    def _begin(self, module: nn.Module, args: Any) -> None:
        finder = self._finder = Finder(inspect.models())
        stream = finder.stream
        stream.make_way, stream.when_over = self.end, self._over
        stream.attach()
        stream.enter_module(module, args)

    def _guarded(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except Exception:
            logger.exception("an iteration could not be watched; training is not affected")
            self.end()


def _ask_others(store: Any, key: str) -> dict[int, str]:
    """Wait for the tables of the other processes; return those that are there at once, by rank."""
    ranks = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        there = [rank for rank in ranks if store.check([f"{key}/{rank}"])]
        if there or time.monotonic() > end:
            return {rank: store.get(f"{key}/{rank}").decode(errors="replace") for rank in there}
        time.sleep(_INTERVAL_SECONDS)


def explain_overflows(after: int | None = 2, times: int = 20, *, replay: bool = False) -> None:
    """From now on, after some skipped steps in a row, watch the next iteration and log why its step is skipped.

    A step counts as skipped if it is applied although its loss, or under a static loss scale a gradient, is not finite.
    This check waits for the device in each block. The results of training do not change. The tables are those of
    ``find_overflow``, logged as warnings of the logger ``apex_npu.debug``. ``python -m apex_npu run
    --explain-overflows=2 script.py`` does the same for a script without a change.

    Args:
        after: The number of skips in a row after which an iteration is watched, 1 or more. None ends the watching.
        times: The maximum number of iterations that are explained. A repeated cause is counted, and not shown again.
        replay: Run a skipped step again, as ``find_overflow`` does, and watch the next iteration only if this does not
            tell the cause. Objects of the script that forward changes are then changed twice.

    Raises:
        ValueError: ``after`` or ``times`` is not a positive integer.

    Example::

        >>> amp.debug.explain_overflows(after=2)
        >>> amp.debug.explain_overflows(None)
    """
    for name, value in (("after", after), ("times", times)):
        valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not valid and not (name == "after" and value is None):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    for known in (inspect.settings.observer, *inspect.observers()):
        if isinstance(known, Explainer):
            known.close()
            inspect.leave(known)
    inspect.settings.observer = explainer = None if after is None else Explainer(after, times, replay=replay)
    if explainer is not None:
        inspect.observe(explainer)
        explainer.session_begins()


def watch_next_iteration() -> None:
    """Watch the next iteration of the current session if nothing else watches it, and log the findings."""
    if not inspect.observers():
        explainer = Explainer(after=math.inf, times=1, once=True)
        inspect.observe(explainer)
        explainer.arm()


def explain_script(after: int, *, replay: bool) -> None:
    """Call ``explain_overflows``, and print a summary at the end of the script."""
    explain_overflows(after, replay=replay)
    explainer = inspect.settings.observer
    assert isinstance(explainer, Explainer)
    Finalize(None, explainer.end_script, exitpriority=0)
