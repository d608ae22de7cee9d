# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What one ``amp.initialize`` has set up, and the one slot that holds it.

The slot exists because ``amp.scale_loss(loss, optimizer)`` names no session. The package has one more mutable global,
``settings``: what old scripts switch before the first ``initialize``.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from apex_npu.amp.casting import CastHandle, ModelCast, enable_casts
from apex_npu.amp.policy import Policy
from apex_npu.amp.scaler import LossScaler


class ConvertedModel:
    """What was changed on one model, for as long as the model lives: nothing here keeps it alive."""

    def __init__(self, cast: ModelCast, handles: list[Any]) -> None:
        """``handles`` have a ``remove()``."""
        self._cast = cast
        self._handles = handles

    @property
    def alive(self) -> bool:
        """False once the model is gone."""
        return self._cast.alive

    def undo(self) -> None:
        """Give the model its own forward and state dict back."""
        self._cast.undo()
        for handle in self._handles:
            handle.remove()


@dataclass(eq=False)
class Session:
    """The state of amp between ``initialize`` and ``shutdown``.

    Attributes:
        policy: What the level and the overrides have come to.
        scalers: One per loss; ``loss_id`` is the index.
        verbosity: 0 silent, 1 normal.
        device_types: Where O1 casts.
        masters: model_param → master_param, for as long as the model parameter lives.
        models: What was changed on models, by this session and those before it.
        casts: What O1 has changed in torch.
    """

    policy: Policy
    scalers: list[LossScaler]
    verbosity: int = 1
    device_types: list[str] = field(default_factory=list)
    masters: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    models: list[ConvertedModel] = field(default_factory=list)
    casts: CastHandle | None = None

    def disable(self) -> None:
        """Make everything pass through."""
        self.policy = replace(self.policy, enabled=False)
        self.scalers = []

    def say(self, text: str) -> None:
        """Print ``text`` unless told to be silent."""
        if self.verbosity > 0:
            print(text, flush=True)


@dataclass
class Settings:
    """What holds for every ``initialize`` to come.

    Attributes:
        accept_low_precision_models: Models with float16 or bfloat16 parameters are accepted.
    """

    accept_low_precision_models: bool = False


settings = Settings()
_lock = threading.Lock()
_current: Session | None = None


def install(session: Session) -> None:
    """Make ``session`` the current one, its casts in place of the former's; if that fails, the former stays.

    Models of the former session stay converted.
    """
    global _current
    with _lock:
        former = _current
        if former is not None and former.casts is not None:
            former.casts.undo()  # first: what two sessions patch nests like brackets
        try:
            session.casts = enable_casts(session.policy, session.device_types)
        except BaseException:
            if former is not None:
                former.casts = enable_casts(former.policy, former.device_types)
            raise
        if former is not None:
            session.models[:0] = [model for model in former.models if model.alive]
            session.masters.update(former.masters)
        _current = session


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
        if former.casts is not None:
            former.casts.undo()
        for model in reversed(former.models):
            model.undo()


def disable_casts() -> AbstractContextManager[Any]:
    """A context in which O1 casts nothing; without O1 it does nothing. Re-entrant, and restored after an exception."""
    return nullcontext() if _current is None or _current.casts is None else _current.casts.disabled()


def master_of(model_param: Tensor) -> Tensor | None:
    """The fp32 master of ``model_param``, or None where it has none."""
    session = _current
    master: Tensor | None = None if session is None else session.masters.get(model_param)
    return master


def is_first_rank() -> bool:
    """True on rank 0, and without torch.distributed."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
