# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What one ``amp.initialize`` has set up, and the one slot that holds it.

The slot exists because ``amp.scale_loss(loss, optimizer)`` names no session. The package has two more mutable globals,
for what comes before any session: the functions that users register casts for (``user_casts.py``), and ``settings``.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch.distributed
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from apex_npu.amp.casting import CastHandle, ModelCast, enable_casts
from apex_npu.amp.clip_guard import Clipper, watch_clipping
from apex_npu.amp.data_parallel import DataParallel
from apex_npu.amp.forward_cast import Ambient
from apex_npu.amp.open_check import OpenCheck
from apex_npu.amp.patched_functions import Patch
from apex_npu.amp.policy import Policy
from apex_npu.amp.scaler import LossScaler
from apex_npu.fusion import are_same


class ConvertedModel:
    """What was changed on one model, for as long as the model lives: nothing here keeps it alive."""

    def __init__(self, cast: ModelCast, give_state_dict_back: Callable[[nn.Module], None]) -> None:
        """Of a model that has just been converted."""
        self._cast = cast
        self._give_state_dict_back = give_state_dict_back

    @property
    def alive(self) -> bool:
        """False once the model is gone, or converted again."""
        return self._cast.model is not None

    def parameter_names(self) -> dict[Tensor, str]:
        """The names of its parameters."""
        model = self._cast.model
        return {} if model is None else {p: name for name, p in model.named_parameters()}

    def shield(self, ambient: Ambient, device_types: Sequence[str]) -> None:
        """Keep the casts of a later session out of it, unless it is one of O1's own."""
        self._cast.shield(ambient, device_types)

    def undo(self) -> None:
        """Give the model its own forward and state dict back."""
        model = self._cast.model
        self._cast.undo()
        if model is not None:
            self._give_state_dict_back(model)


@dataclass(eq=False)
class Session:
    """The state of amp between ``initialize`` and ``shutdown``.

    Attributes:
        policy: What the level and the overrides have come to.
        open_checks: For each scaler what its last block has left open about its gradients.
        verbosity: 0 silent, 1 normal.
        device_types: Where O1 casts.
        patches: The functions that users have registered casts for.
        masters: model_param → master_param, for as long as the model parameter lives.
        adopted: The optimizers that were passed to ``initialize``, of this session and those before it.
        models: What was changed on models, by this session and those before it.
        casts: What O1 has changed in torch.
        ambient: Where these casts are on outside of models.
        thread: The one that called ``initialize``.
        skip_alarm: Skipped steps in a row after which an error is logged; None: never.
        overflow_group: The processes that decide together whether a step is skipped; None: this one alone.
        data_parallel: Who averages gradients with whom; None: nobody here.
        data_parallels: Those of this session and of those before it.
        no_sync_depth: How many ``no_sync`` contexts are open.
    """

    policy: Policy
    _scalers: list[LossScaler]
    verbosity: int = 1
    device_types: list[str] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    masters: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    adopted: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    models: list[ConvertedModel] = field(default_factory=list)
    casts: CastHandle | None = None
    skip_alarm: int | None = 50
    ambient: Ambient = field(default_factory=Ambient)
    thread: threading.Thread = field(default_factory=threading.current_thread)
    overflow_group: Any = None
    data_parallel: DataParallel | None = None
    data_parallels: list[DataParallel] = field(default_factory=list)
    no_sync_depth: int = 0
    open_checks: dict[LossScaler, OpenCheck] = field(default_factory=dict)
    _watch: ExitStack = field(default_factory=ExitStack)
    _warned: set[str] = field(default_factory=set)

    def disable(self) -> None:
        """Make everything pass through."""
        self.policy = replace(self.policy, enabled=False)
        self._scalers = []

    @property
    def scalers(self) -> list[LossScaler]:
        """One per loss; ``loss_id`` is the index. They know of all blocks that are behind."""
        self.close_checks()
        return self._scalers

    def scaler(self, loss_id: int) -> LossScaler:
        """That of one loss; it knows of all blocks of this loss that are behind.

        Raises:
            IndexError: ``loss_id`` is not below ``num_losses``.
        """
        if not isinstance(loss_id, int) or not 0 <= loss_id < len(self._scalers):
            raise IndexError(
                f"loss_id must be in [0, {len(self._scalers)}), got {loss_id!r}; raise num_losses in amp.initialize"
            )
        scaler = self._scalers[loss_id]
        self.close_checks(scaler)
        return scaler

    def close_checks(self, scaler: LossScaler | None = None) -> None:
        """Have decided what blocks have left open.

        Args:
            scaler: Those of this one and of this thread; None: all. Another thread may be about to write the gradients
                that would have to be looked at.
        """
        thread = threading.get_ident()
        for concerned, check in list(self.open_checks.items()):
            if scaler is None or concerned is scaler or check.thread == thread:
                check.close()

    def parameter_names(self) -> WeakTensorKeyDictionary:
        """The names of all parameters of models that are alive."""
        names = WeakTensorKeyDictionary()
        for model in self.models:
            names.update(model.parameter_names())
        return names

    def enable(self) -> None:
        """Patch what this session needs patched; all of it, or nothing if something fails."""
        with ExitStack() as undo:
            if self.policy.enabled:
                watch_clipping(undo, self._look_at_clipping, self._clipper_of)
            self.casts = enable_casts(self.policy, self.device_types, self.patches)
            self._watch = undo.pop_all()
        self.ambient.active = True

    def undo(self) -> None:
        """Undo ``enable``."""
        if self.casts is not None:
            self.casts.undo()
        self._watch.close()
        self.ambient.active = False

    def _clipper_of(self, params: list[Tensor]) -> Clipper | None:
        """The optimizer that steps just ``params``, where all of their gradients lie in float32 buffers."""
        for optimizer in self.adopted:
            if not optimizer._amp_record.clips_like_torch():
                continue
            own = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
            in_order = are_same(own, params)  # as amp.master_params gives them
            if in_order or set(map(id, own)) == set(map(id, params)):
                clipper: Clipper = optimizer
                return clipper
        return None

    def _look_at_clipping(self, name: str, params: list[Tensor]) -> None:
        given = {id(p) for p in params}

        def concerns(optimizer: Any) -> bool:
            return any(id(p) in given for group in optimizer.param_groups for p in group["params"])

        for optimizer in self.adopted:
            if optimizer._amp_record.open_check is not None and concerns(optimizer):
                optimizer._amp_record.look()  # inf clipped by value is none any more
        if any(o._amp_record.held_scale != 1.0 and concerns(o) for o in self.adopted):
            self.warn_once(
                f"torch.nn.utils.{name} was given gradients that fuse_unscale=True keeps multiplied with the loss "
                "scale until step: it clips them as if they were larger than they are. Call "
                "optimizer.clip_optimizer_grad_norm_fused(max_norm) instead, or leave fuse_unscale out",
                stacklevel=4,
            )
        if any(p in self.masters for p in params):
            self.warn_once(
                f"torch.nn.utils.{name} was given parameters whose fp32 masters the optimizer steps: behind "
                "amp.scale_loss the gradients that count are the masters', and these are not clipped. Give it "
                "amp.master_params(optimizer), or call optimizer.clip_optimizer_grad_norm_fused(max_norm)",
                stacklevel=4,
            )

    def warn_once(self, text: str, stacklevel: int = 3) -> None:
        """Warn, if this session has not said so before."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel)

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

    Models of the former session keep the level they were converted at.
    """
    global _current
    with _lock:
        former = _current
        if former is not None:
            former.undo()  # first: what two sessions patch nests like brackets
            session.adopted.update(former.adopted)
            session.masters.update(former.masters)
        try:
            session.enable()
        except BaseException:
            if former is not None:
                former.enable()
            raise
        if former is not None:
            kept = [model for model in former.models if model.alive]
            if session.casts is not None and session.casts.active:
                for model in kept:
                    model.shield(session.ambient, session.device_types)
            session.models[:0] = kept
            session.data_parallels[:0] = former.data_parallels
        _current = session


def check_thread(caller: str) -> None:
    """Raise where ``caller`` would take amp away from another thread.

    Raises:
        RuntimeError: The current session belongs to another thread that still runs.
    """
    owner = None if _current is None or not _current.policy.enabled else _current.thread
    if owner is not None and owner is not threading.current_thread() and owner.is_alive():
        raise RuntimeError(
            f"{caller} was called in thread {threading.current_thread().name!r}, while thread {owner.name!r} uses amp: "
            "there is one amp for a process. Pass all models and optimizers to one amp.initialize, which threads may "
            "then share, each with its own loss_id; or call amp.shutdown() in the other thread first"
        )


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

    Raises:
        RuntimeError: Another thread, which still runs, has called ``initialize``.
    """
    global _current
    check_thread("amp.shutdown")
    with _lock:
        former, _current = _current, None
    if former is not None:
        former.undo()
        for parallel in former.data_parallels:
            parallel.close()
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
