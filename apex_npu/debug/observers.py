# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``observe`` and ``leave``: several observers in the one place that a session has for them."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from apex_npu.amp.optimizer_state import adopted_inside, inner_optimizer
from apex_npu.amp.session import Observer, Session


class Observers:
    """An observer that hands on to several, the latest first."""

    def __init__(self, members: list[Observer]) -> None:
        """To ``members``."""
        self.members = members

    def __getattr__(self, name: str) -> Any:
        # The methods of ``Observer``; pickle and deepcopy look up others before ``members`` is there.
        if name not in vars(Observer):
            raise AttributeError(name)

        def tell(*args: Any) -> None:
            for member in self.members:
                getattr(member, name)(*args)

        return tell


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
    several: Any = Observers(members)
    session.observer = several if len(members) > 1 else members[0] if members else None


def stepped(optimizers: Any) -> list[Optimizer]:
    """The optimizers of a block without what is around them."""
    listed = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    return list(map(inner_optimizer, map(adopted_inside, listed)))
