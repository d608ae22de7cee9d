# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``observe`` and ``leave``: several observers in the one place that a session has for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.optimizer_state import adopted_inside, inner_optimizer
from apex_npu.amp.session import Observer, Session
from apex_npu.amp.step_decision import StepReport


class Observers:
    """An observer that hands on to several, the latest first."""

    def __init__(self, members: list[Observer]) -> None:
        """To ``members``."""
        self.members = members

    def block_begins(self, loss: Tensor, optimizers: Any, loss_id: int, scale: float, dynamic: bool) -> None:
        """See ``Observer``."""
        for member in self.members:
            member.block_begins(loss, optimizers, loss_id, scale, dynamic)

    def backward_ended(self) -> None:
        """See ``Observer``."""
        for member in self.members:
            member.backward_ended()

    def block_ended(self) -> None:
        """See ``Observer``."""
        for member in self.members:
            member.block_ended()

    def step_skipped(self, report: StepReport) -> None:
        """See ``Observer``."""
        for member in self.members:
            member.step_skipped(report)


def observers_of(session: Session) -> list[Observer]:
    """Those that ``session`` has, the latest first."""
    observer = session.observer
    return list(observer.members) if isinstance(observer, Observers) else [] if observer is None else [observer]


def observe(session: Session, observer: Observer) -> None:
    """Tell ``observer``, too, of the blocks and skipped steps of ``session``."""
    _set(session, [observer, *observers_of(session)])


def leave(session: Session, observer: Observer) -> None:
    """Tell ``observer`` no longer; the others stay, in whichever order they came."""
    _set(session, [other for other in observers_of(session) if other is not observer])


def _set(session: Session, members: list[Observer]) -> None:
    session.observer = Observers(members) if len(members) > 1 else members[0] if members else None


def stepped(optimizers: Any) -> list[Optimizer]:
    """The optimizers of a block without what is around them."""
    listed = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    return list(map(inner_optimizer, map(adopted_inside, listed)))
