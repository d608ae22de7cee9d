# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What one ``amp.initialize`` has set up, and the one slot that holds it.

The slot exists because ``amp.scale_loss(loss, optimizer)`` names no session. The package has no other mutable global.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from apex_npu.amp.policy import Policy
from apex_npu.amp.scaler import LossScaler


@dataclass(eq=False)
class Session:
    """The state of amp between ``initialize`` and ``shutdown``.

    Attributes:
        policy: What the level and the overrides have come to.
        scalers: One per loss; ``loss_id`` is the index.
        verbosity: 0 silent, 1 normal.
        masters: model_param → master_param, for as long as the model parameter lives.
        casts_disabled: Gives a context in which O1 casts nothing.
        undo_casts: Takes back what O1 has patched in torch.
        undo_models: Each takes back what was patched on one model.
    """

    policy: Policy
    scalers: list[LossScaler]
    verbosity: int = 1
    masters: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    casts_disabled: Callable[[], AbstractContextManager[Any]] = nullcontext
    undo_casts: Callable[[], None] = lambda: None
    undo_models: list[Callable[[], None]] = field(default_factory=list)

    def disable(self) -> None:
        """Make everything pass through."""
        self.policy = replace(self.policy, enabled=False)
        self.scalers = []

    def say(self, text: str) -> None:
        """Print ``text`` unless told to be silent."""
        if self.verbosity > 0:
            print(text, flush=True)


_lock = threading.Lock()
_current: Session | None = None


def install(session: Session) -> None:
    """Make ``session`` the current one. What the former one patched in torch is undone, its models stay converted."""
    global _current
    with _lock:
        former, _current = _current, session
    if former is not None:
        former.undo_casts()
        session.undo_models[:0] = former.undo_models
        session.masters.update(former.masters)


def current() -> Session | None:
    """The session of the last ``initialize``, if any."""
    return _current


def require(caller: str) -> Session:
    """The current session.

    Raises:
        RuntimeError: There is none; the message names ``caller``.
    """
    if _current is None:
        raise RuntimeError(
            f"{caller} was called, but amp has not been initialized: call "
            "`model, optimizer = amp.initialize(model, optimizer, opt_level=...)` first"
        )
    return _current


def shutdown() -> None:
    """Undo what ``initialize`` patched: functions of torch, forwards and state_dict hooks of models.

    Models keep the dtype of their parameters, optimizers their master parameters. Without a session nothing happens.
    """
    global _current
    with _lock:
        former, _current = _current, None
    if former is not None:
        former.undo_casts()
        for undo in reversed(former.undo_models):
            undo()


def disable_casts() -> AbstractContextManager[Any]:
    """A context in which O1 casts nothing; without O1 it does nothing. Re-entrant, and restored after an exception."""
    return nullcontext() if _current is None else _current.casts_disabled()


def master_of(model_param: Tensor) -> Tensor | None:
    """The fp32 master of ``model_param``, or None where it has none."""
    session = _current
    master: Tensor | None = None if session is None else session.masters.get(model_param)
    return master


def is_first_rank() -> bool:
    """True on rank 0, and without torch.distributed."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
