# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer under amp: ``AmpOptimizerMixin`` stands before its class, see ``adoption.py``.

So ``step``, ``zero_grad`` and ``add_param_group`` are ordinary methods, deepcopy and pickle carry the state along, and
nothing on the instance has to be put back.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
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
from apex_npu.backends._torch_private import disable_dynamo
from apex_npu.distributed import clip_grad_norm_
from apex_npu.fusion import FlatGrads, FusedGroup, HasFusedGroups, check_combinable
from apex_npu.fusion.shards import replicated


class AmpOptimizerMixin(OptimizerAccessors):
    """What amp adds to an optimizer: skipped steps, masters, and clearing the gradients of both of a pair."""

    _amp_state: AmpOptimizerState

    @disable_dynamo
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the optimizer, or none if the gradients have overflowed; then masters are copied to the model.

        Args:
            *args: Those of the optimizer's own step. A closure is called before it, so that an overflow skips the step.
            **kwargs: Likewise.

        Returns:
            What the optimizer's own step returns; where it is skipped, what the closure has returned, or None.

        Raises:
            RuntimeError: A closure where amp cannot honour it; or a CUDA graph has captured the block, and not this.
        """
        # What torch's learning rate schedulers record, and the marks by which they detect that this needs no wrapper.
        self._opt_called = True
        state = self._amp_state
        capturing = (torch.cuda.is_initialized() or "torch_npu" in sys.modules) and is_capturing()
        if capturing or state.stage is Stage.CAPTURED:
            check_step(self, state)
        result = None
        if args or kwargs:
            result, args, kwargs = _evaluate_closure(self, state, args, kwargs)
        begun, pending = False, state.pending
        try:
            check = None if pending is None else pending.prepare(self, state)
            if check is None and state.decision is not None and state.decision.skip:
                state.skip_step(self)
                return result
            doubt = state.begin_step(self)
            if doubt is not None:
                warn_once(self, doubt)
            begun = True
            own = super().step
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
        """Clear the gradients of all parameters, and of the model parameters that have masters.

        Args:
            set_to_none: As of the optimizer's own; None: as that does it by default.
            *args: Others that it takes.
            **kwargs: Likewise.

        Returns:
            What it returns.
        """
        state = self._amp_state
        if state.pending is not None:
            state.pending.resolve()  # while the gradients are still there
        adopted: Any = type(self)
        if set_to_none is None:
            result = super().zero_grad(*args, **kwargs)
            set_to_none = _default_set_to_none(adopted)
            if set_to_none is None:
                set_to_none = bool(getattr(self, "set_grad_none", True))
        elif not args and _takes_set_to_none_by_name(adopted):
            result = super().zero_grad(set_to_none=set_to_none, **kwargs)
        else:
            result = super().zero_grad(set_to_none, *args, **kwargs)
        state.clear(set_to_none)
        return result

    @disable_dynamo
    def clip_optimizer_grad_norm_fused(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip what ``amp.master_params(optimizer)`` gives to a common norm; see ``FusedOptimizer``.

        Call it after scale_loss, before ``step``. Without combined gradients they are clipped one by one. With
        ``fuse_unscale`` nothing is written: the next step multiplies by what is missing.

        Raises:
            RuntimeError: Gradients are still to be unscaled: a scale_loss is open, or the last had ``delay_unscale``.
        """
        state = self._amp_state
        # At a scale of 1 a plain backward is as good as a block, but for masters, and only a block ends what is left to
        # a step.
        fuses = state.policy.fuse_unscale and (state.grad_scale != 1.0 or state.masters.masters)
        if not fuses:
            return self._clip_at_once(max_norm, norm_type, error_if_nonfinite)
        state.check_unscaled("clipping")
        groups = state.grad_groups(self)
        state.drop_cleared(self)
        flats, unfused = _gradients_of(groups)
        norm: Tensor = state.pending.clip(state.grad_scale, flats, unfused, max_norm, norm_type, error_if_nonfinite)
        return norm

    def _clip_at_once(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        groups: list[GradGroup] | None = None,
    ) -> Tensor:
        state = self._amp_state
        state.check_unscaled("clipping")
        if state.pending is not None:
            state.pending.start()  # an inf that is clipped is none any more
        groups = state.grad_groups(self) if groups is None else groups
        if state.pending is not None:
            state.pending.clip_now(groups)
        state.drop_cleared(self)
        return clip_grad_norm_(*_gradients_of(groups), max_norm, norm_type, error_if_nonfinite)

    def _clip_like_torch(self, groups: list[GradGroup], *args: Any, **kwargs: Any) -> Tensor:
        """``clip_optimizer_grad_norm_fused``, which returns what torch's function would: of sharded ones a DTensor."""
        norm, meshes = self._clip_at_once(*args, **kwargs, groups=groups), self._amp_state.grads.meshes
        return replicated(norm, meshes[0]) if meshes else norm

    def clip_model_grad_norm_fused(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Like ``clip_optimizer_grad_norm_fused`` where the model's parameters are the optimizer's.

        Raises:
            RuntimeError: The level has masters: clipping the model's own gradients would do nothing.
        """
        _require_no_masters(self._amp_state, "clip_model_grad_norm_fused", "clip_optimizer_grad_norm_fused")
        return self.clip_optimizer_grad_norm_fused(max_norm, norm_type, error_if_nonfinite)

    def get_optimizer_combined_params(self) -> list[Tensor]:
        """All parameters that the optimizer trains; see ``FusedOptimizer``. Masters come first.

        Raises:
            RuntimeError: As there; or the optimizer is not a fused one of this package.
        """
        if not isinstance(self, HasFusedGroups):
            raise RuntimeError(
                f"{type(self).__name__} does not keep its parameters in combined buffers: use an optimizer of "
                "apex_npu.optimizers, or the parameters themselves (amp.master_params)"
            )
        self._amp_state.masters.show_new()
        found: list[Tensor] = super().get_optimizer_combined_params()  # type: ignore[misc]
        self._amp_state.grad_groups(self)  # which take over from those of other buffers
        return found

    def get_optimizer_combined_grads(self) -> list[Tensor]:
        """The gradients of all that the optimizer trains: one flat buffer over all param groups.

        With masters there are two, of the masters and of the parameters that have none; and there is one for each
        device and dtype. A gradient that is None is zeros, and stays None; what else is written to a buffer the next
        step takes. Call it after each block. Empty without combined gradients.

        Raises:
            RuntimeError: As of ``FusedOptimizer.get_optimizer_combined_params``; or the last block had
                ``delay_unscale``, so that gradients are still to be unscaled.
        """
        flats = _combined_grads(self, self._amp_state)
        return [flat.show() for flat in flats]

    def get_optimizer_combined_grad_masks(self) -> list[Tensor]:
        """For each of these buffers float32 ones where there is a gradient, and zeros elsewhere; raises likewise."""
        flats = _combined_grads(self, self._amp_state)
        return [flat.mask() for flat in flats]

    def get_model_combined_params(self) -> list[Tensor]:
        """The model's parameters: the buffers of what the optimizer steps, with those of masters' model parameters.

        These are laid out like the masters. The next step overwrites what is written to them.

        Raises:
            RuntimeError: As of ``get_optimizer_combined_params``; or a model parameter shares its memory.
        """
        found, masters = self.get_optimizer_combined_params(), self._amp_state.masters
        if not masters.masters:
            return found
        groups: list[FusedGroup] = self.combined_groups()  # type: ignore[attr-defined]
        return masters.combined_model(groups)

    def leading_params(self) -> list[Tensor]:
        """See ``HasFusedGroups``."""
        return self._amp_state.masters.masters

    def check_combining(self) -> None:
        """See ``HasFusedGroups``."""
        if self._amp_state.stage is Stage.SCALED:
            raise RuntimeError(
                "combined buffers cannot be made inside of amp.scale_loss, which is at work on the gradients: call the "
                "accessor after the block, or once before it. Nothing has moved"
            )
        check_combinable()

    def moving_params(self) -> AbstractContextManager[None]:
        """See ``HasFusedGroups``."""
        return self._amp_state.masters.moving()

    def get_model_combined_grads(self) -> list[Tensor]:
        """The flat buffers of the model's gradients, without masters."""
        _require_no_masters(self._amp_state, "get_model_combined_grads", "get_optimizer_combined_grads")
        return self.get_optimizer_combined_grads()

    def get_model_combined_grad_masks(self) -> list[Tensor]:
        """Their masks, without masters."""
        _require_no_masters(self._amp_state, "get_model_combined_grad_masks", "get_optimizer_combined_grad_masks")
        return self.get_optimizer_combined_grad_masks()

    @property
    def combine_ddp(self) -> bool:
        """Gradients are averaged over processes. Setting it to False, on all of them, takes this optimizer out of that.

        Raises:
            RuntimeError: It is set between ``scale_loss`` and ``step``, or to True without ``initialize``'s.
        """
        return self._amp_state.averages

    @combine_ddp.setter
    def combine_ddp(self, value: bool) -> None:
        self._amp_state.combine(combine_ddp=bool(value))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As the optimizer has it. ``GradScaler.step`` asks for this before anything else, and is told of AmpScaler.

        Raises:
            RuntimeError: It does, and would look for the gradients of masters, which only a block gives them.
        """
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if caller is not None and isinstance(caller.f_locals.get("self"), GradScaler):
            _name_amp_scaler(self, self._amp_state)
        own, name = vars(self), "_step_supports_amp_scaling"
        supports: bool = own[name] if name in own else getattr(super(), name)
        return supports

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those in low precision get masters where the level has any."""
        super().add_param_group(param_group)
        state = state_of(self)
        session = current()
        if state is None or state.masters.retired:
            return
        made = state.policy.store_param_remainders or (state.policy.master_weights and state.masters.make(self))
        if made and session is not None:
            session.register(self, state)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict, as the optimizer's own does; all processes have the remainders that it loads."""
        result = super().load_state_dict(*args, **kwargs)
        masters = self._amp_state.masters
        if not masters.masters:
            masters.own_values = []
        return result

    def join_hook(self, **kwargs: Any) -> Any:
        """What torch.distributed.algorithms.Join requires; optimizers that torch has made joinable have it.

        Raises:
            RuntimeError: Gradients are averaged by ``combine_ddp``, which Join does not support.
        """
        if self._amp_state.sync is not None:
            raise RuntimeError(
                "Join cannot let a process that has run out of data stand in for itself under combine_ddp=True: all "
                "processes have to call amp.scale_loss equally often. Pad or drop the last batches (DistributedSampler "
                "does either), or wrap the model in DistributedDataParallel instead, which has join()"
            )
        return super().join_hook(**kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Classes made by ``adopt`` are found again through the class they were made from."""
        state = {**self.__getstate__(), "_amp_state": self._amp_state}
        return new_adopted, (type(self).__bases__[1],), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        super().__setstate__(state)
        self._amp_state.masters.belong_to(self)


class SharedGroupsMixin(AmpOptimizerMixin):
    """An optimizer that shares its groups with one inside of it, as SAM does with its base optimizer, or that one.

    Both have one state: a step of the inner one that the script calls by itself is skipped after an overflow, and
    brings masters to the model; one that the outer one's step calls is a part of that.
    """

    _amp_stepping: list[Optimizer]

    @disable_dynamo
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """See ``AmpOptimizerMixin``; inside of a step of the other it is the optimizer's own."""
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


# Functions rather than methods: a name of the mixin would hide the same name of the class it is put before.


def _gradients_of(groups: list[GradGroup]) -> tuple[list[FlatGrads], list[Tensor]]:
    """Buffers of gradients, and parameters whose gradients are in none."""
    flats = [group.flat for group in groups if group.flat is not None]
    return flats, [p for group in groups if group.flat is None for p in group.params]


def _combined_grads(optimizer: Optimizer, state: AmpOptimizerState) -> list[FlatGrads]:
    """The combined buffers of gradients; these are as ``step`` takes them, outside of blocks."""
    if state.stage is Stage.DELAYED:
        state.check_unscaled("reading combined gradients")
    elif state.stage is not Stage.SCALED:
        groups = state.grad_groups(optimizer)
        if state.pending is not None:
            state.pending.start()  # an inf that a script overwrites is none any more
        if state.holds_scaled:
            state.pending.unscale_now_(state, groups)
        for group in groups:
            group.drop_cleared()
    return state.grads.combined(optimizer, state)


def _name_amp_scaler(optimizer: Optimizer, state: AmpOptimizerState) -> None:
    """Warn of a GradScaler that is about to step ``optimizer``, or refuse it where there are masters."""
    if current() is None:
        return
    text = (
        f"torch.amp.GradScaler.step was called with {type(optimizer).__name__}, whose gradients amp scales, unscales "
        "and checks: use scaler = amp.AmpScaler(optimizer) in its place, which has the same methods"
    )
    if state.policy.master_weights:
        raise RuntimeError(f"{text}. At {state.policy.opt_level} it steps fp32 masters, which have no gradients")
    warn_once(optimizer, text)


@functools.cache
def _takes_set_to_none_by_name(adopted: Any) -> bool:
    """Whether ``zero_grad`` of the class that ``adopted`` was made from takes it as a keyword."""
    parameters = inspect.signature(adopted.__bases__[1].zero_grad).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return "set_to_none" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


@functools.cache
def _default_set_to_none(adopted: Any) -> bool | None:
    """What ``zero_grad`` of the class that ``adopted`` was made from does without an argument, if it says so."""
    parameter = inspect.signature(adopted.__bases__[1].zero_grad).parameters.get("set_to_none")
    return None if parameter is None or parameter.default is None else bool(parameter.default)


def _evaluate_closure(
    optimizer: Optimizer, state: AmpOptimizerState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call the closure among the arguments of a step, if there is one.

    Returns:
        What it has returned, and the arguments with one in its place that returns the same.
    """
    positional = bool(args) and callable(args[0])
    closure = args[0] if positional else kwargs.get("closure")
    if closure is None:
        return None, args, kwargs
    loss = _evaluate(optimizer, state, closure)
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


def _evaluate(optimizer: Optimizer, state: AmpOptimizerState, closure: Callable[[], Any]) -> Any:
    """The loss of ``closure``: here, not inside the optimizer, so that an overflow in it still skips the step."""
    if isinstance(optimizer, LBFGS) or state.masters.masters:
        raise RuntimeError(
            "Currently, Amp does not support closure use with optimizers. Compute the loss, call scale_loss "
            "and backward, then step() without arguments"
        )
    with torch.enable_grad():
        return closure()


def _require_no_masters(state: AmpOptimizerState, name: str, instead: str) -> None:
    if state.masters.masters:
        raise RuntimeError(
            f"{name} can only be used when opt_level='O1' (or without masters); at "
            f"{state.policy.opt_level} the gradients that count are the masters': use {instead}"
        )


@functools.cache
def adopted_class(cls: Any, mixin: Any = AmpOptimizerMixin) -> Any:
    """The class of an adopted optimizer that was one of ``cls``."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def new_adopted(cls: Any) -> Optimizer:
    """An optimizer of the class that ``adopt`` makes from ``cls``, with nothing in it yet: what pickles call."""
    adopted: type[Optimizer] = adopted_class(cls)
    return adopted.__new__(adopted)
