# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Session``: the setup of one ``amp.initialize``, and the global variable that holds the current one.

The global exists because ``amp.scale_loss(loss, optimizer)`` names no session. The package has two more mutable
globals, which are set before any session: the users' registered casts (``user_casts.py``), and ``settings``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from apex_npu.amp.accessors import step_without
from apex_npu.amp.clip_guard import watch_clipping
from apex_npu.amp.data_parallel import DataParallel
from apex_npu.amp.float32_copies import copies_of, restore_float32
from apex_npu.amp.kept_values import follow_broadcast
from apex_npu.amp.policy import Policy
from apex_npu.amp.scaler import LossScaler, StepReport
from apex_npu.amp.widened_grads import clearing_aside
from apex_npu.autocast.casting import CastHandle
from apex_npu.autocast.float32_view import average_in_float32
from apex_npu.autocast.forward_cast import CastForward
from apex_npu.autocast.monkey_patches import compute_matrix_exp_in_float32
from apex_npu.backends.patching import patch_attribute
from apex_npu.backends.script_warnings import warn
from apex_npu.distributed.consistency import GroupReference
from apex_npu.distributed.fully_sharded import HeldGradients, units_of
from apex_npu.distributed.torch_ddp import KnownDDPs, adding_to, around_broadcast, dtypes_of, follow_dtypes, watch_ddps
from apex_npu.ops import LOW_PRECISION


class Observer:
    """An observer of blocks and steps. Packages above amp override its methods, which do nothing."""

    def session_begins(self) -> None:
        """Act after ``initialize`` has converted its models, if this observer is that of ``settings``."""

    def block_begins(self, loss: Tensor, optimizers: Any, loss_id: int, scale: float, dynamic: bool) -> None:
        """Act before a ``scale_loss`` block with these arguments and this loss scale begins."""

    def backward_ended(self) -> None:
        """Act after the user's code in the block has ended; gradients are as backward has left them."""

    def block_ended(self) -> None:
        """Act after the block has ended, also after an exception."""

    def step_skipped(self, report: StepReport) -> None:
        """Act after a step has been skipped."""


@dataclass
class Settings:
    """Settings for all later calls of ``initialize``.

    Attributes:
        accept_low_precision_models: Models with float16 or bfloat16 parameters are accepted.
        observer: The observer of new sessions, if any.
        labels: The ranges that a profiler sees, from ``debug``; None: no profiler is on.
    """

    accept_low_precision_models: bool = False
    observer: Observer | None = None
    labels: Any = None


settings = Settings()


@dataclass(eq=False)
class Session:
    """The state of amp between ``initialize`` and ``shutdown``.

    Attributes:
        policy: The policy that results from the level and the overrides.
        open_checks: For each scaler the ``OverflowCheck`` that its last block has left open.
        verbosity: 0 silent, 1 normal.
        patches: Functions that patch those for which users have registered casts.
        adopted: The optimizers that were passed to ``initialize``, in this session and earlier ones, and their copies.
        models: The forwards of models that this session and earlier ones have converted.
        casts: O1's casts of functions.
        thread: The thread that called ``initialize``.
        skip_alarm: Number of consecutive skipped steps after which an error is logged; None: never.
        overflow_group: The processes that decide together whether a step is skipped; None: this process alone.
        held: Gradients that the units of ``fully_shard`` hold back; None: no model has units.
        data_parallel: Averages gradients over processes; None: amp does not average gradients.
        data_parallels: The ``data_parallel`` objects of this session and earlier ones.
        no_sync_depth: Number of open ``no_sync`` contexts.
        ddps: The DistributedDataParallel instances of this process.
        observers: Observers of blocks and skipped steps, in the order of their calls. The list is replaced, not
            changed.
        reached: For each optimizer, the other optimizers whose parameters also get gradients from its blocks.
        spare_flags: For each device, a flag that a block has found to be 0, for the next block.
        undo: The calls that undo ``enable``, when another session replaces this one, or at ``shutdown``.
    """

    policy: Policy
    _scalers: list[LossScaler]
    verbosity: int = 1
    patches: list[Callable[[ExitStack], None]] = field(default_factory=list)
    adopted: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    models: list[weakref.ref[CastForward]] = field(default_factory=list)
    casts: CastHandle = field(default_factory=lambda: CastHandle(before_forward=before_forward))
    skip_alarm: int | None = 50
    thread: threading.Thread = field(default_factory=threading.current_thread)
    overflow_group: GroupReference | None = None
    held: HeldGradients | None = None
    data_parallel: DataParallel | None = None
    data_parallels: list[DataParallel] = field(default_factory=list)
    no_sync_depth: int = 0
    ddps: KnownDDPs = field(default_factory=list)
    observers: list[Observer] = field(default_factory=lambda: [] if settings.observer is None else [settings.observer])
    open_checks: dict[LossScaler, Any] = field(default_factory=dict)
    reached: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = field(default_factory=weakref.WeakKeyDictionary)
    spare_flags: dict[torch.device, Tensor] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)
    _warned: weakref.WeakKeyDictionary[Any, set[str]] = field(default_factory=weakref.WeakKeyDictionary)

    def check_sharded_before(self) -> None:
        """Raise if a model was sharded after ``initialize``, so that an optimizer finds no gradients."""
        for model in self.live_models():
            for unit in units_of(model):
                if self.held is None or not self.held.knows(unit):
                    raise RuntimeError(
                        f"fully_shard was called on {unit.name or 'the model'} after amp.initialize, and has replaced "
                        "the parameters that the optimizer holds. Call fully_shard first, with "
                        f"mp_policy=amp.fsdp_policy({self.policy.opt_level!r}), then make the optimizer, then call "
                        "amp.initialize"
                    )

    @property
    def scalers(self) -> list[LossScaler]:
        """The scalers, one per loss, with ``loss_id`` as index. They account for all blocks that have ended."""
        self.resolve_checks()
        return self._scalers

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of one loss. It accounts for all blocks of this loss that have ended.

        Raises:
            IndexError: ``loss_id`` is not below ``num_losses``.
        """
        if not isinstance(loss_id, int) or not 0 <= loss_id < len(self._scalers):
            raise IndexError(
                f"loss_id must be in [0, {len(self._scalers)}), got {loss_id!r}; raise num_losses in amp.initialize"
            )
        scaler = self._scalers[loss_id]
        if self.open_checks:
            self.resolve_checks(scaler)
        return scaler

    def scaler_states(self) -> dict[str, Any]:
        """Return the states of all scalers in Apex's format."""
        return {f"loss_scaler{i}": scaler.state_dict() for i, scaler in enumerate(self.scalers)}

    def load_scaler_states(self, state_dict: Any) -> None:
        """Load the argument of ``amp.load_state_dict``, or nothing if it is invalid."""
        if not self.policy.enabled:
            return
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"state_dict must be a dict as amp.state_dict() returns it, got {type(state_dict).__name__}"
            )
        if {"scale", "_growth_tracker"} <= state_dict.keys():  # torch's GradScaler: one scale, for all losses
            state = {"loss_scale": state_dict["scale"], "unskipped": state_dict["_growth_tracker"]}
            state_dict = {f"loss_scaler{i}": state for i in range(len(self.scalers))}
        unexpected = [key for key in state_dict if "loss_scaler" not in key]
        if unexpected:
            listed = ", ".join(f'"{key}"' for key in unexpected)
            raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {listed}. ")
        if len(state_dict) != len(self.scalers):
            warn(
                f"state_dict contains {len(state_dict)} entries, while {len(self.scalers)} loss_scalers are used; they "
                "are assigned in order"
            )
        before = [scaler.state_dict() for scaler in self.scalers]
        try:
            for scaler, state in zip(self.scalers, state_dict.values(), strict=False):
                scaler.load_state_dict(state)
        except (KeyError, TypeError, ValueError) as error:
            for scaler, state in zip(self.scalers, before, strict=True):
                scaler.load_state_dict(state)
            raise ValueError(f"state_dict has no valid loss scaler: {error}. Nothing has been loaded") from error

    def resolve_checks(self, scaler: LossScaler | None = None) -> None:
        """Resolve the checks that blocks have left open.

        Args:
            scaler: Resolve the checks of this scaler and of this thread; None: all. Other threads may be writing the
                gradients that their checks read.
        """
        thread = threading.get_ident()
        for concerned, check in list(self.open_checks.items()):
            if scaler is None or concerned is scaler or check.thread == thread:
                check.resolve()

    def register(self, optimizer: Any, state: Any) -> None:
        """Register ``optimizer``, and link it with the models that it steps. New masters take their kept values."""
        self.adopted.add(optimizer)
        for link in state.links:
            link.add_copies(self.add_copy)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self.live_models():
            copies = copies_of(model)
            if copies is not None and any(id(p) in stepped for p in model.parameters()):
                if copies.link not in state.links:
                    state.links.append(copies.link)
                copies.link.add(model, state.masters)

    def continue_from(self, former: Session) -> None:
        """Take over the optimizers and models of ``former`` that still exist."""
        self.adopted.update(former.adopted)
        self.models[:0] = [reference for reference in former.models if reference() is not None]
        self.data_parallels[:0] = former.data_parallels
        if former.held is not None:
            self.held = self.held or HeldGradients(())
            self.held.add(former.held)

    def add_copy(self, model: nn.Module) -> None:
        """Add ``model``, which a script has copied together with its optimizer."""
        forward: CastForward = vars(model)["forward"]
        forward.ambient = self.casts
        self.models = [*(reference for reference in self.models if reference() is not None), weakref.ref(forward)]

    def live_models(self) -> list[nn.Module]:
        """Return the models that were passed to ``initialize``, or copied with their optimizers, and still exist."""
        return [forward.model for reference in self.models if (forward := reference()) is not None]

    def parameter_names(self) -> dict[Tensor, str]:
        """Return the names of all parameters of ``live_models()``."""
        return {p: name for model in self.live_models() for name, p in model.named_parameters()}

    def enable(self) -> None:
        """Apply the patches of this session. If this fails, ``undo`` has the part that was done."""
        if self.policy.enabled:
            watch_clipping(self.undo, self.adopted, self.warn_once)
            patch_attribute(self.undo, nn.Module, "zero_grad", clearing_aside(self.adopted))
            average_in_float32(self.undo)
            if self.policy.model_dtype in LOW_PRECISION and "cpu" in self.casts.device_types:
                compute_matrix_exp_in_float32(self.undo)
            self.undo.callback(watch_ddps(self.ddps, self._check_averaged_once).remove)
            patch_attribute(self.undo, DistributedDataParallel, "__setstate__", adding_to(self.ddps))
            patch_attribute(
                self.undo,
                nn.parallel.distributed,
                "_sync_module_states",
                around_broadcast(before_broadcast, partial(follow_broadcast, self.adopted, self.scalers)),
            )
        self.undo.callback(self.casts.undo)
        self.casts.enable(self.policy, self.patches)
        if self.casts.active:
            step_without(self.casts, self.undo)
        for forward in filter(None, [reference() for reference in self.models]):
            forward.ambient = self.casts

    def check_regions(self, caller: str) -> None:
        """Raise if ``caller`` would undo this session inside an autocast region, whose end would restore its casts."""
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        if nesting and self.casts.is_here():
            raise RuntimeError(
                f"{caller} was called inside torch.autocast, or inside the forward of a model, whose end would switch "
                f"the casts of {self.policy.opt_level} on again; call it after the block"
            )

    def restore_models(self) -> None:
        """Make models float32 again, and update the DistributedDataParallel instances around them."""
        with ExitStack() as following:
            for ddp, dtypes in dtypes_of(self.ddps):
                following.callback(follow_dtypes, ddp, dtypes)
            for reference in reversed(self.models):
                _restore(reference)

    def _check_averaged_once(self, module: nn.Module) -> None:
        """Raise if DistributedDataParallel wraps a ``module`` whose gradients combine_ddp averages."""
        wrapped = {id(p) for p in module.parameters()}
        for optimizer in self.adopted:
            state = optimizer._amp_state
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            if state.averages and any(id(p) in wrapped for p in stepped):
                raise RuntimeError(
                    f"{type(module).__name__} was given to DistributedDataParallel, but combine_ddp=True of "
                    f"amp.initialize averages the gradients of its {type(optimizer).__name__} already; the two would "
                    "wait for each other, or the processes diverge. Train the model without the wrapper, or leave "
                    "combine_ddp out"
                )

    def warn_once(self, about: Any, text: str) -> None:
        """Emit a warning about ``about``, an optimizer or loss scaler, unless this session has already emitted it."""
        said = self._warned.setdefault(about, set())
        if text not in said:
            said.add(text)
            warn(text)

    def tell_skipped(self, report: StepReport) -> None:
        """Print that a step was skipped, and notify the observers."""
        self.say(
            f"Gradient overflow.  Skipping step, loss scaler {report.loss_id} reducing loss scale to "
            f"{report.scale_after}"
        )
        for observer in self.observers:
            observer.step_skipped(report)

    def say(self, text: str) -> None:
        """Print ``text`` unless ``verbosity`` is 0."""
        if self.verbosity > 0:
            print(text, flush=True)


def _restore(reference: weakref.ref[CastForward]) -> None:
    """Restore a model's own forward, state dict and float32 values, which come from masters if there are any."""
    forward = reference()
    if forward is not None:
        restore_float32(forward.model)
        forward.undo()


_lock = threading.Lock()
_current: Session | None = None


def install(session: Session) -> None:
    """Make ``session`` the current one, and replace the former's casts. If this fails, the former session stays.

    Models of the former session keep their level.
    """
    global _current
    with _lock:
        former = _current
        states = [] if former is None else [optimizer._amp_state for optimizer in former.adopted]
        own = list(session.adopted)
        params = [p for model in session.live_models() for p in model.parameters()]
        replaced = [state for state in states if any(map(state.masters.has, params))]
        undo = ExitStack()
        try:
            for state in replaced:
                state.retire(undo)
            if former is not None:
                former.undo.close()  # first, because patches of two sessions must be nested
                session.continue_from(former)
            session.enable()
            _current = session
        except BaseException:
            undo.close()
            session.undo.close()
            if former is not None:
                former.undo.close()
                former.enable()
            raise
        for optimizer in own:  # link with models of the former session
            session.register(optimizer, optimizer._amp_state)
        for observer in session.observers:
            observer.session_begins()


@contextmanager
def standing_in(session: Session) -> Iterator[None]:
    """Make ``session`` the current one inside the context, with its casts on. Then restore the former session.

    Inside, use only models converted for ``session``, not the models or optimizers of the former session.
    """
    global _current
    former = _current
    with disable_casts():
        try:
            _current = session
            session.undo.callback(session.casts.undo)
            session.casts.enable(session.policy, session.patches)
            yield
        finally:
            session.undo.close()
            _current = former


def check_thread(caller: str) -> None:
    """Raise if ``caller`` would replace a session of another thread that still runs."""
    owner = None if _current is None or not _current.policy.enabled else _current.thread
    if owner is not None and owner is not threading.current_thread() and owner.is_alive():
        raise RuntimeError(
            f"{caller} was called in thread {threading.current_thread().name!r}, while thread {owner.name!r} uses amp: "
            "there is one amp for a process. Pass all models and optimizers to one amp.initialize, and let each thread "
            "use its own loss_id; or call amp.shutdown() in the other thread first"
        )


def current() -> Session | None:
    """Return the session of the last ``initialize``, if any."""
    return _current


def warn_once(about: Any, text: str) -> None:
    """Emit a warning about ``about``, unless the current session has already emitted it."""
    if _current is None:
        warn(text)
    else:
        _current.warn_once(about, text)


def require(caller: str) -> Session:
    """Return the current session. Raise if there is none; the message names ``caller``."""
    if _current is None:
        raise RuntimeError(
            f"{caller} was called, but amp has not been initialized: call "
            "`model, optimizer = amp.initialize(model, optimizer, opt_level=...)` first"
        )
    return _current


def shutdown() -> None:
    """Undo the patches of ``initialize``: functions of torch, forwards and state_dict hooks of models.

    Models that were cast are float32 again, with the values of their masters. ``step`` of optimizers that had masters
    raises. Without a session nothing happens.

    Raises:
        RuntimeError: Another thread that still runs has called ``initialize``. Or, at O1 or O4, the call is inside an
            autocast region, such as a model's forward.

    Example::

        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> amp.shutdown()
        >>> model(input).dtype
        torch.float32
    """
    global _current
    check_thread("amp.shutdown")
    if settings.labels is not None:
        settings.labels.close_unless_used()
    with _lock:
        former = _current
        if former is not None:
            former.check_regions("amp.shutdown")
            former.undo.close()
            for parallel in former.data_parallels:
                parallel.close()
            former.restore_models()
            for optimizer in former.adopted:
                if optimizer._amp_state.masters.params():
                    optimizer._amp_state.retire()
        _current = None  # last: after an error another call completes it


def disable_casts() -> AbstractContextManager[Any]:
    """Return a context that disables the casts of O1; without O1 it does nothing.

    It can be nested, and it restores the casts after an exception.

    Example::

        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> with amp.disable_casts():
        ...     output = model(input)
        >>> output.dtype
        torch.float32
    """
    return nullcontext() if _current is None else _current.casts.disabled()


def before_broadcast() -> None:
    """Copy a script's writes to the masters, before DistributedDataParallel broadcasts the 16-bit values."""
    before_forward()
    for optimizer in [] if _current is None else list(_current.adopted):
        optimizer._amp_state.masters.begin_step(optimizer)


def before_forward() -> None:
    """Copy a script's writes to state dicts and float32 data to the models, before the models are read."""
    for copies in [] if _current is None else filter(None, map(copies_of, _current.live_models())):
        if copies.link.showing:
            copies.link.load_written()
    for optimizer in [] if _current is None else list(_current.adopted):
        masters = optimizer._amp_state.masters
        masters.end_loop()
        masters.take_assigned()
