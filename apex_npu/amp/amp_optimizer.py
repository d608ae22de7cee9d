# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``AmpOptimizerMixin``: the first base class of an optimizer under amp (``adoption.py``).

``step``, ``zero_grad`` and ``add_param_group`` are therefore ordinary methods, and deepcopy and pickle keep the state.
"""

from __future__ import annotations

import functools
import inspect
import sys
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer

from apex_npu.amp.accessors import OptimizerAccessors
from apex_npu.amp.capture import check_step
from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage, state_of
from apex_npu.amp.session import current, warn_once
from apex_npu.backends import is_capturing
from apex_npu.backends._torch_private import disable_dynamo, labelled
from apex_npu.distributed.part_sums import clip_grad_norm_
from apex_npu.fusion import FlatGrads, FusedGroup, HasFusedGroups, check_combinable
from apex_npu.fusion.shards import replicated

STEPPED_BY_SCALER = (
    "torch.amp.GradScaler.step was called with {}, whose gradients amp scales, unscales and checks: use scaler = "
    "amp.AmpScaler(optimizer) instead, which has the same methods"
)
SHARED_LATER = (
    "a parameter of {} was added to {}, and each would step a float32 value of its own: add it before amp.initialize, "
    "or remove it from the other optimizer first"
)


class AmpOptimizerMixin(OptimizerAccessors):
    """The methods that amp adds to an optimizer: they skip steps, step float32 values, and clear all gradients."""

    _amp_state: AmpOptimizerState

    @disable_dynamo
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless the gradients have overflowed.

        16-bit parameters are updated in float32, then rounded.

        Args:
            *args: Positional arguments of the optimizer's own step. A closure is called before that step, so that an
                overflow skips it.
            **kwargs: Keyword arguments of the optimizer's own step.

        Returns:
            The result of the optimizer's own step. If it is skipped, the result of the closure, or None.

        Raises:
            RuntimeError: amp cannot use the closure, or a CUDA graph has captured the block without this step.
        """
        # torch's learning rate schedulers set this in a wrapper. The marks below tell them that no wrapper is needed.
        self._opt_called = True
        state = self._amp_state
        capturing = (torch.cuda.is_initialized() or "torch_npu" in sys.modules) and is_capturing()
        if capturing or state.stage is Stage.CAPTURED:
            check_step(self, state)
        result = None
        if args or kwargs:
            result, args, kwargs = _evaluate_closure(self, args, kwargs)
        begun, pending = False, state.pending
        try:
            check = None if pending is None else pending.prepare(self, state)
            if check is None and state.decision is not None and state.decision.skip:
                state.skip_step(self)
                return result
            warning = state.begin_step(self)
            if warning is not None:
                warn_once(self, warning)
            begun = True
            own = super().step
            with state.masters.stepping():
                if pending is None:
                    result = own(*args, **kwargs)
                else:
                    result = pending.take(self, state, check, partial(own, *args, **kwargs))
            begun = False
            state.end_step(self, check)
        except BaseException as error:
            state.end_failed_step(self, error, begun=begun)
            raise
        return result

    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @disable_dynamo
    def zero_grad(self, set_to_none: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Clear the gradients of all parameters. Inside a block, also clear those that the block has set aside.

        Args:
            set_to_none: Passed to the optimizer's own ``zero_grad``. None: the default of that method.
            *args: Other positional arguments of that method.
            **kwargs: Other keyword arguments of that method.

        Returns:
            The result of the optimizer's own ``zero_grad``.
        """
        state = self._amp_state
        if state.pending is not None:
            state.pending.resolve()  # while the gradients still exist
        cls: Any = type(self)
        by_name, default = _set_to_none_of(cls.__bases__[1].zero_grad)
        if set_to_none is None:
            result = super().zero_grad(*args, **kwargs)
            set_to_none = bool(getattr(self, "set_grad_none", True)) if default is None else default
        elif not args and by_name:
            result = super().zero_grad(set_to_none=set_to_none, **kwargs)
        else:
            result = super().zero_grad(set_to_none, *args, **kwargs)
        state.clear(set_to_none)
        return result

    @disable_dynamo
    def clip_optimizer_grad_norm_fused(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of ``amp.master_params(optimizer)`` to a common norm; see ``FusedOptimizer``.

        Call it after scale_loss, before ``step``. Without combined gradients they are clipped one by one. With
        ``fuse_unscale`` it writes no gradient: the next step applies the clipping factor.

        Raises:
            RuntimeError: Gradients are not unscaled: a scale_loss is open, or the last one had ``delay_unscale``.
        """
        state = self._amp_state
        state.check_unscaled("clipping")
        groups = state.grads.groups_of(self)
        # At a scale of 1 backward may run outside of blocks, but only a block removes a clipping factor left to a step.
        fuses = state.policy.fuse_unscale and (state.grad_scale != 1.0 or state.widens)
        if not fuses:
            return self._clip_at_once(groups, max_norm, norm_type, error_if_nonfinite)
        state.drop_cleared(self)
        flats, unfused = _gradients_of(groups)
        norm: Tensor = state.pending.clip(state.grad_scale, flats, unfused, max_norm, norm_type, error_if_nonfinite)
        return norm

    @labelled("amp.clip")
    def _clip_at_once(self, groups: list[GradGroup], *args: Any, **kwargs: Any) -> Tensor:
        state = self._amp_state
        if state.pending is not None:
            state.pending.start()  # clipping would hide an inf
            state.pending.clip_now(groups)
        state.drop_cleared(self)
        return clip_grad_norm_(*_gradients_of(groups), *args, **kwargs)

    def _clip_like_torch(self, groups: list[GradGroup], *args: Any, **kwargs: Any) -> Tensor:
        """Clip as ``clip_optimizer_grad_norm_fused``, but return a DTensor for sharded gradients, as torch does."""
        self._amp_state.check_unscaled("clipping")
        norm, meshes = self._clip_at_once(groups, *args, **kwargs), self._amp_state.grads.meshes
        return replicated(norm, meshes[0]) if meshes else norm

    def get_optimizer_combined_params(self) -> list[Tensor]:
        """Return all parameters that the optimizer trains, 16-bit ones first; see ``FusedOptimizer``.

        Raises:
            RuntimeError: ``FusedOptimizer`` raises it, or the optimizer is not a fused one of this package.
        """
        if not isinstance(self, HasFusedGroups):
            raise RuntimeError(
                f"{type(self).__name__} does not keep its parameters in combined buffers: use an optimizer of "
                "apex_npu.optimizers, or the parameters themselves (amp.master_params)"
            )
        groups = self.combined_groups()
        self._amp_state.grads.groups_of(self)  # replaces groups of former buffers
        return self._amp_state.masters.combined_model(groups)

    @disable_dynamo  # FakeTensor cannot hold a 16-bit parameter with a float32 gradient
    def get_optimizer_combined_grads(self) -> list[Tensor]:
        """Return the gradients of all trained parameters in one flat buffer over all param groups.

        There is one buffer for each device and dtype of parameters. That of 16-bit parameters is float32 at O2 and O5,
        and comes first. A gradient that is None appears as zeros and stays None. The next step uses all other values
        written to a buffer. Call it after each block. The list is empty without combined gradients.

        Raises:
            RuntimeError: ``FusedOptimizer.get_optimizer_combined_params`` raises it, or the last block had
                ``delay_unscale``, so that gradients are not unscaled.
        """
        flats = _combined_grads(self, self._amp_state)
        return [flat.show() for flat in flats]

    @disable_dynamo
    def get_optimizer_combined_grad_masks(self) -> list[Tensor]:
        """Return a float32 mask for each buffer of ``get_optimizer_combined_grads``: 1 where a gradient exists, else 0.

        Raises:
            RuntimeError: ``get_optimizer_combined_grads`` raises it.
        """
        flats = _combined_grads(self, self._amp_state)
        return [flat.mask() for flat in flats]

    # The optimizer steps the model's parameters.
    clip_model_grad_norm_fused = clip_optimizer_grad_norm_fused
    get_model_combined_params = get_optimizer_combined_params
    get_model_combined_grads = get_optimizer_combined_grads
    get_model_combined_grad_masks = get_optimizer_combined_grad_masks

    def combined_groups(self) -> list[FusedGroup]:
        """Return the groups of the combined buffers, made while parameters have float32 data."""
        with self._amp_state.masters.stepping():
            groups: list[FusedGroup] = super().combined_groups()  # type: ignore[misc]
        return groups

    def leading_params(self) -> list[Tensor]:
        """Return the parameters with masters, whose combined buffers come first."""
        return self._amp_state.masters.params()

    def flat_grads(self) -> list[FlatGrads]:
        """Return the gradient buffers of all parameters, made while parameters have float32 data."""
        with self._amp_state.masters.stepping():
            flats: list[FlatGrads] = super().flat_grads()  # type: ignore[misc]
        return flats

    def check_combining(self) -> None:
        """Raise if combined buffers may not be made now, as inside of a ``scale_loss`` block. Nothing has moved."""
        if self._amp_state.stage is Stage.SCALED:
            raise RuntimeError(
                "combined buffers cannot be made inside of amp.scale_loss, which is at work on the gradients: call the "
                "accessor after the block, or once before it. Nothing has moved"
            )
        check_combinable()

    def moving_params(self) -> AbstractContextManager[None]:
        """Return the context in which the masters follow parameters to other addresses."""
        return self._amp_state.masters.moving()

    @property
    def combine_ddp(self) -> bool:
        """True if gradients are averaged over processes. Set it to False on all processes to stop averaging.

        Raises:
            RuntimeError: It is set between ``scale_loss`` and ``step``, or to True without ``combine_ddp=True`` in
                ``initialize``.
        """
        return self._amp_state.averages

    @combine_ddp.setter
    def combine_ddp(self, value: bool) -> None:
        self._amp_state.combine(combine_ddp=bool(value))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return the optimizer's own value. If ``GradScaler.step`` reads it, warn that ``AmpScaler`` is needed."""
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        del frame  # which would refer to itself: only garbage collection would free the variables of all callers
        by_scaler = caller is not None and isinstance(caller.f_locals.get("self"), GradScaler)
        if by_scaler and current() is not None:
            warn_once(self, STEPPED_BY_SCALER.format(type(self).__name__))
        own, name = vars(self), "_step_supports_amp_scaling"
        supports: bool = own[name] if name in own else getattr(super(), name)
        return supports

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. At O2 and O5 amp keeps the float32 values of 16-bit parameters.

        Raises:
            RuntimeError: Another optimizer steps one of them, so that each would have a float32 value of it. Nothing
                has been added.
        """
        super().add_param_group(param_group)
        state = state_of(self)
        session = current()
        if state is None or state.masters.retired:
            return
        if state.widens and session is not None:
            added = set(map(id, self.param_groups[-1]["params"]))
            for other in session.adopted:
                if other is not self and any(id(p) in added for group in other.param_groups for p in group["params"]):
                    del self.param_groups[-1]
                    raise RuntimeError(SHARED_LATER.format(type(other).__name__, type(self).__name__))
        if state.widens and state.masters.make(self) and session is not None:
            session.register(self, state)

    def state_dict(self, **options: Any) -> dict[str, Any]:
        """Return the optimizer's own state dict. The float32 values of parameters are in the model's.

        Args:
            options: Those of the optimizer's own method, such as ``encoded``.
        """
        masters = self._amp_state.masters
        masters.end_loop()
        return masters.without_values(super().state_dict(**options))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as the optimizer's own method does. All processes have the remainders that it loads."""
        masters = self._amp_state.masters
        with masters.loading():
            result = super().load_state_dict(*args, **kwargs)
        masters.own_values = []
        return result

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook that torch.distributed.algorithms.Join requires, for optimizers that torch made joinable.

        Raises:
            RuntimeError: ``combine_ddp`` averages gradients, which Join does not support.
        """
        if self._amp_state.parallel is not None:
            raise RuntimeError(
                "torch.distributed.algorithms.Join does not support combine_ddp=True: all processes have to call "
                "amp.scale_loss equally often. Pad or drop the last batches (DistributedSampler does either), or wrap "
                "the model in DistributedDataParallel instead, which has join()"
            )
        return super().join_hook(**kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a class made by ``adopt`` through the class that it was made from."""
        state = {**self.__getstate__(), "_amp_state": self._amp_state}
        return new_adopted, (type(self).__bases__[1],), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``, and make the copy known to the session."""
        super().__setstate__(state)
        self._amp_state.masters.belong_to(self)
        session = current()
        if session is not None:
            session.adopted.add(self)


class SharedGroupsMixin(AmpOptimizerMixin):
    """The methods of an outer and an inner optimizer with the same ``param_groups``, as SAM and its base optimizer.

    Both have the same amp state. If the script calls a step of the inner optimizer, amp skips it after an overflow and
    steps float32 values. If the outer optimizer's step calls it, it is a part of that step.
    """

    _amp_stepping: list[Optimizer]

    @disable_dynamo
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as ``AmpOptimizerMixin`` does; inside a step of the other optimizer, run the optimizer's own step."""
        stepping = self._amp_stepping
        if stepping:
            return super(AmpOptimizerMixin, self).step(*args, **kwargs)
        try:
            stepping.append(self)
            return super().step(*args, **kwargs)
        finally:
            stepping.clear()

    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


# Functions rather than methods: a name of the mixin would hide the same name of the optimizer's own class.


def _gradients_of(groups: list[GradGroup]) -> tuple[list[FlatGrads], list[Tensor]]:
    """Return the buffers of gradients, and the parameters whose gradients are not in a buffer."""
    flats = [group.flat for group in groups if group.flat is not None]
    return flats, [p for group in groups if group.flat is None for p in group.params]


def _combined_grads(optimizer: Optimizer, state: AmpOptimizerState) -> list[FlatGrads]:
    """Return the combined gradient buffers. Outside of blocks the gradients are as ``step`` uses them."""
    if state.stage is Stage.DELAYED:
        state.check_unscaled("reading combined gradients")
    elif state.stage is not Stage.SCALED:
        groups = state.grads.groups_of(optimizer)
        if state.pending is not None:
            state.pending.start()  # a script could overwrite an inf
        if state.holds_scaled:
            state.pending.unscale_now_(state, groups)
        for group in groups:
            group.drop_cleared()
    return state.grads.combined(optimizer)


@functools.cache
def _set_to_none_of(zero_grad: Any) -> tuple[bool, bool | None]:
    """Return whether ``zero_grad`` accepts ``set_to_none`` as a keyword, and the default; None without a default."""
    parameters = inspect.signature(zero_grad).parameters
    own = parameters.get("set_to_none")
    by_name = own is not None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return by_name, None if own is None or own.default is None else bool(own.default)


def _evaluate_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call the closure among the arguments of a step, if there is one, so that an overflow still skips the step.

    Returns:
        The closure's result, and the arguments with a replacement closure that returns this result.
    """
    positional = bool(args) and callable(args[0])
    closure = args[0] if positional else kwargs.get("closure")
    if closure is None:
        return None, args, kwargs
    if isinstance(optimizer, LBFGS):
        raise RuntimeError(
            "LBFGS calls its closure many times in a step, but under amp the gradients of each backward are checked "
            "before the step: pass only the model, as in amp.initialize(model, opt_level='O4'), and call "
            "loss.backward() in the closure without scale_loss"
        )
    with torch.enable_grad():
        loss = closure()
    results = [loss]

    def evaluated() -> Any:
        if not results:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() calls its closure more than once, but under amp the gradients of "
                "each backward are checked before the step: call scale_loss, backward and the parts of the step one by "
                "one, without a closure"
            )
        return results.pop()

    return (loss, (evaluated, *args[1:]), kwargs) if positional else (loss, args, {**kwargs, "closure": evaluated})


# The methods of published optimizers that write weights outside of ``step``: SAM's, ScheduleFree's, Lookahead's, SWA's.
_WRITING_WEIGHTS = (
    "first_step", "second_step", "ascent_step", "descent_step", "train", "eval", "sync_lookahead", "swap_swa_sgd",
    "update_swa", "_backup_and_load_cache", "_clear_and_load_backup", "backup_and_load_cache", "clear_and_load_backup",
)  # fmt: skip


def _in_float32(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._amp_state.masters.float32_data():
            return getattr(super(AmpOptimizerMixin, self), name)(*args, **kwargs)

    method.__name__ = name
    return method


@functools.cache
def adopted_class(cls: Any, mixin: Any = AmpOptimizerMixin) -> Any:
    """Return the class of adopted optimizers of ``cls``. Its methods that write weights run on float32 data."""
    writing = {name: _in_float32(name) for name in _WRITING_WEIGHTS if callable(getattr(cls, name, None))}
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (mixin, cls), {**writing, **names})


def new_adopted(cls: Any) -> Optimizer:
    """Return an empty optimizer of the class that ``adopt`` makes from ``cls``; pickles call this."""
    adopted: type[Optimizer] = adopted_class(cls)
    return adopted.__new__(adopted)
