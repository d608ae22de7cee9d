# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loop that all fused optimizers share. A subclass adds hyper-parameters, their checks and one ``update``."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import Optimizer, ParamsT

from apex_npu._extension import disable_dynamo
from apex_npu.backends import is_capturing
from apex_npu.fusion import (
    FlatGrads,
    FusedGroup,
    Run,
    clip_grad_norm_,
    drop_grads,
    increment_versions,
    is_sharded,
)
from apex_npu.fusion.grad_slots import LOOSE, PRESENT, LooseFor
from apex_npu.optimizers.capture import check_gradients, check_groups, refusal
from apex_npu.optimizers.checks import check_bool, check_params, naming
from apex_npu.optimizers.failed_steps import half_updated, may_have_written
from apex_npu.optimizers.fused_param_group import FusedParamGroup
from apex_npu.optimizers.shown_state import ShownState, StateSlot
from apex_npu.optimizers.state_dicts import check_state_dict, indexed_params

logger = logging.getLogger("apex_npu")

ParamGroup = dict[str, Any]


class FusedOptimizer(Optimizer):
    """Steps flat buffers instead of tensors; in all else a ``torch.optim.Optimizer``.

    Parameters, gradients and state of each (param_group, device, dtype) lie in flat buffers, so a step is one pass of
    one kernel over each. Fusing happens at the first step and keeps every Parameter's identity. What the user does to
    tensors in between (``p.data = …``, ``.to()``, ``load_state_dict``, ``add_param_group``, unfreezing) is noticed at
    the next step and followed from the values found then.

    float16 and bfloat16 parameters are updated in float32 arithmetic and rounded once; their state is float32.
    Parameters without a gradient are left alone, their step count included, as torch.optim does.

    Every fused optimizer takes ``fuse_grad_scaler``: True lets ``torch.amp.GradScaler.step`` hand over its scale and
    its overflow flag, so that unscaling is part of the step. Then ``.grad`` stays scaled, before and behind the step,
    and tools that clip in between must be told (``scaler.unscale_``), as with torch's own fused optimizers.

    Those that take ``capturable`` can be captured in a CUDA graph with it, as torch's can: steps are counted on the
    device (``state["step"]`` lies there), a learning rate that is a tensor there is read there, and no step waits for
    the device; with ``fuse_grad_scaler`` not for a GradScaler's flag either. A capture must find everything as the step
    before has left it: take some steps first. On a CPU nothing is different.
    """

    is_npu_fused_optimizer = True
    # True where state_dict() shows a `step` per parameter, as torch.optim's optimizer of the same rule does.
    has_step_state: ClassVar[bool] = True
    # States that only some hyper-parameters call for: a state dict may have them or lack them.
    optional_states: ClassVar[tuple[str, ...]] = ()
    # States of one number for each parameter, rather than one for each element.
    scalar_states: ClassVar[tuple[str, ...]] = ()
    # True where no element's update depends on other elements, so that a part of a parameter can be stepped by itself.
    elementwise: ClassVar[bool] = False
    # True where ``update`` takes whatever may be a tensor: ``learning_rate``, ``run.step`` and ``run.found_inf``.
    supports_capture: ClassVar[bool] = False
    # What gradients have to be divided by in the next step alone, one float32 number: how amp hands over its scale.
    grad_scale_of_step: Tensor | None = None
    # Where it is not 0 the next step alone is skipped, one float32 number: how amp hands over what it has found.
    found_inf_of_step: Tensor | None = None
    # A GradScaler is left to unscale by itself where a parameter is sharded.
    _may_leave_scaling: bool = False
    # True: print when parameters had to be fused again, and why; "error": raise instead.
    check_combined_tensors: bool | Literal["error"] = False

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        fuse_grad_scaler: bool | None = False,  # None: where it is capturable, and no parameter is sharded
        capturable: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        check_bool("fuse_grad_scaler", fuse_grad_scaler is None or fuse_grad_scaler)
        check_bool("capturable", capturable)
        check_bool("set_grad_none", set_grad_none)
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        # The first is the name by which torch.amp.GradScaler asks.
        self._step_supports_amp_scaling = capturable if fuse_grad_scaler is None else fuse_grad_scaler
        self._may_leave_scaling = fuse_grad_scaler is None
        self._forget_fusion()
        # Without a default learning rate every group has to bring its own; each is checked when it is added.
        if defaults.get("lr", 0.0) is not None:
            with naming(type(self).__name__):
                self.validate(defaults)
        super().__init__(params, defaults)

    # What a rule provides

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``, each with an error that names it, its rule and its value."""
        raise NotImplementedError(f"{type(self).__name__} must define validate(group)")

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """The per-element states that the rule keeps for ``group``, in the order of torch's state dict."""
        raise NotImplementedError(f"{type(self).__name__} must define state_names(group)")

    def initial_state(self, name: str, group: ParamGroup) -> float:
        """What the elements of state ``name`` are before a parameter's first step."""
        return 0.0

    def before_updates(self, runs: list[tuple[Run, ParamGroup]]) -> None:
        """Called once a step with all runs, before the first ``update``: for what spans all parameters."""

    def update(self, run: Run, group: ParamGroup) -> None:
        """Apply the rule to ``run``: flat ``param``, ``grad``, ``state(name)``, and ``step``, counted from 1.

        What it needs of ``run`` is asked for, and what it finds wrong is raised (as TypeError or ValueError), before
        anything is written.

        ``run.grad`` is never to be written. Ops that take a ``grad_scale`` and a ``model_param`` get
        ``run.scaled_grad``, ``run.grad_scale`` and ``run.model_param()`` instead, and save a pass or two.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(run, group)")

    def takes_lists(self, group: ParamGroup, fused: FusedGroup) -> bool:
        """True where ``update`` looks at ``run.is_listed``, and for ``fused`` a list saves the gathering."""
        return False

    def learning_rate(self, run: Run, group: ParamGroup) -> float | Tensor:
        """``group["lr"]``: a tensor where that is one, and the device can read it by itself."""
        lr: float | Tensor = group["lr"]
        readable = self.capturable and isinstance(lr, Tensor) and lr.device == run.param.device
        return lr if readable else float(lr)

    # What users call

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **older: Any) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss anew; called with gradients enabled, before the update.
            older: ``grad_scaler`` alone: a GradScaler that hands over itself, as torch's once did and torch_npu's does.
                It is not in the signature, by which torch's own decides what to hand over.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: A gradient is sparse, or of another dtype, or a CUDA graph is being captured that could not
                replay this step; nothing has been updated then. Or a device has failed, or run out of memory, in the
                middle of an update: the message says that this step cannot be repeated.
            torch.OutOfMemoryError: There is no memory for state, and nothing has been updated then; or there was none
                in the middle of an update, and the message says so.
            TypeError: A parameter has become one of a dtype that cannot be fused; likewise. Or there is an argument
                that a step does not have.
        """
        scaler = self._scaler_of(older) if older else None
        capturing = is_capturing()
        if capturing:
            self._check_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if scaler is not None:
            self._take_over(scaler)
        overflow, grad_scale = self._overflow(), self._take_grad_scale()
        if overflow is True:
            return loss
        found_inf = overflow if isinstance(overflow, Tensor) else None
        self._fuse()
        for record in self._fused:
            record.bring_gradients()
        if capturing:
            self._check_captured_gradients()
        # A gradient may look at a parameter, which is about to be written: it is copied, unless it surely does not.
        in_slots = all(fused.in_slots for fused in self.fused_groups())
        work = [
            (group, fused, self._gather(group, fused, in_slots))
            for group, record in zip(self.param_groups, self._fused, strict=True)
            for fused in record.groups
        ]
        runs: list[tuple[Run, ParamGroup]] = []
        begun = updated = 0
        counted = 1.0 if found_inf is None else (found_inf == 0).to(torch.float32)
        try:
            for group, fused, states in work:
                runs += [(run, group) for run in self._advance(group, fused, states, counted)]
            self._hand_scale_to(runs, grad_scale, found_inf)
            self.before_updates(runs)
            for run, group in runs:
                begun += 1
                self.update(run, group)
                updated += 1
                # Writes to the flat buffer are invisible to autograd: without this it could not notice that a parameter
                # changed between forward and backward.
                increment_versions(run.params)
                increment_versions(self._owners_of(run.params))
        except BaseException as error:
            interrupted = begun > updated and not isinstance(error, Exception)
            try:
                # Python handles an interrupt when a kernel has returned, most likely: that run has been stepped.
                for run, _ in runs[begun if interrupted else updated :]:
                    run.take_back()
            finally:
                if begun and may_have_written(error, updated):
                    raise half_updated(type(self).__name__, error) from error
                if interrupted:
                    logger.error("%s", half_updated(type(self).__name__, error))
            raise
        self._shown.remember_joined(self, self._slots())
        return loss

    def _scaler_of(self, older: dict[str, Any]) -> Any:
        for name in older.keys() - {"grad_scaler"}:
            raise TypeError(f"{type(self).__name__}.step() got an unexpected keyword argument {name!r}")
        return older["grad_scaler"]

    def _take_over(self, grad_scaler: Any) -> None:
        """Have ``grad_scaler`` look for overflow where it has not, and take its flag and scale for this step."""
        state = grad_scaler._per_optimizer_states[id(self)]
        if state["stage"] is OptState.READY:
            grad_scaler._check_inf_per_device(self)
        scale = grad_scaler._get_scale_async()
        flags = [flag.to(scale.device, non_blocking=True) for flag in state["found_inf_per_device"].values()]
        self.found_inf_of_step = sum(flags[1:], start=flags[0]) if flags else None
        self.grad_scale_of_step = None if state["stage"] is OptState.UNSCALED else scale

    def _gather(self, group: ParamGroup, fused: FusedGroup, in_slots: bool) -> bytes:
        grads = fused.grads
        if in_slots and grads.reads_lists and self.takes_lists(group, fused):
            return grads.gather_unless_listed()
        return grads.gather(loose_for=LooseFor.STEPPING if in_slots else LooseFor.WRITING)

    def _of_scaler(self, name: str) -> Tensor | None:
        """What a GradScaler has handed over for this step."""
        return getattr(self, name, None) if self._step_supports_amp_scaling else None

    def _overflow(self) -> bool | Tensor:
        """What amp or a GradScaler has found, where it handed that over: such a step is skipped.

        A tensor where only the device need know, so that nothing waits for it.
        """
        told, self.found_inf_of_step = self.found_inf_of_step, None
        found_inf = told if told is not None else self._of_scaler("found_inf")
        if found_inf is None:
            return False
        return found_inf if self.skips_on() == found_inf.device else bool(found_inf)

    def steps_by_rule_alone(self) -> bool:
        """False for a class whose ``step`` or ``update`` does more than the rule that says that it heeds a flag."""
        cls: Any = type(self)
        return _steps_by_rule_alone(cls)

    def skips_on(self) -> torch.device | None:
        """The device that can skip a step, for a number there that the host has not read; None: none can."""
        if not self.capturable:
            return None
        devices = {p.device for group in self.param_groups for p in group["params"]}
        return devices.pop() if len(devices) == 1 and devices != {torch.device("cpu")} else None

    def _check_capture(self) -> None:
        """Raise where a captured step could not be replayed, for all that is known before its gradients are."""
        if not self.capturable:
            because = "it counts steps on the host"
            raise refusal(type(self).__name__, because, capturable=False, supported=self.supports_capture)
        check_groups(type(self).__name__, self.param_groups, self._of_scaler("found_inf"))

    def _check_current(self) -> None:
        current = len(self._fused) == len(self.param_groups) and all(
            record.is_current(group["params"], self.state_names(group))
            for record, group in zip(self._fused, self.param_groups, strict=True)
        )
        if not current or not self._shown.is_in(self.state):
            raise refusal(type(self).__name__, "its parameters or its state are not those of the step before")

    def _check_captured_gradients(self) -> None:
        """The same for gradients, before they are brought anywhere."""
        name = type(self).__name__
        groups = self.fused_groups()
        check_gradients(name, (p.grad for fused in groups for p in fused.params if p.grad is not None))
        if not all(fused.steps_as_before() for fused in groups):
            raise refusal(name, "other parameters have gradients than in the step before, or counts have been written")
        for fused in groups:
            fused.keep_runs()

    def _take_grad_scale(self) -> Tensor | None:
        """What the gradients have yet to be divided by: told by amp for one step, or by a GradScaler."""
        told, self.grad_scale_of_step = self.grad_scale_of_step, None
        return told if told is not None else self._of_scaler("grad_scale")

    @staticmethod
    def _hand_scale_to(runs: list[tuple[Run, ParamGroup]], scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Have gradients divided in the same pass as the update, and overflow looked for."""
        for run, _ in runs:
            run.grad_scale = None if scale is None else scale.to(run.param.device, torch.float32).reshape(1)
            run.found_inf = found_inf

    def _advance(self, group: ParamGroup, fused: FusedGroup, states: bytes, counted: float | Tensor) -> list[Run]:
        fused.forget_copy()
        if PRESENT not in states and LOOSE not in states:
            return []
        counts = self.has_step_state or bool(self.state_names(group))

        def join(index: int) -> None:
            part = fused.params[index]
            self._shown.join(self, StateSlot(group, fused, index, next(iter(self._owners_of([part])), part)))

        return fused.advance(states, join, addend=counted if counts else 0.0)

    @disable_dynamo
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop all gradients, or with ``set_to_none=False`` write zeros into those that exist.

        Without an argument they are dropped, as torch does; NVIDIA's signatures have a ``set_grad_none`` for that.
        """
        set_to_none = self.set_grad_none if set_to_none is None else set_to_none
        if set_to_none:
            with torch.autograd.profiler.record_function(self._zero_grad_profile_name):  # as torch does
                for group in self.param_groups:
                    drop_grads(group["params"])
            for fused in self.fused_groups():
                fused.grads.forget_stepped()
        elif not self._fused or any(record.owners for record in self._fused):
            super().zero_grad(set_to_none)
        elif not self._zero_slots():
            for grads in self.flat_grads():
                grads.zero_()

    def _zero_slots(self) -> bool:
        """Where all gradients lie in slots, zero these: it does not matter whether parameters still lie in theirs."""
        groups = [group["params"] for group in self.param_groups]
        if len(groups) != len(self._fused):
            return False
        held = [fused.grads for fused in self.fused_groups()]
        fits = all(record.holds_all(params) for record, params in zip(self._fused, groups, strict=True))
        if not fits or not all(grads.all_present() for grads in held):
            return False
        for grads in held:
            grads.flat.zero_()
        return True

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters, at any time; they are fused at the next step and move nothing that is already fused.

        Raises:
            ValueError: A hyper-parameter is out of range, or a parameter is listed twice.
            TypeError: A hyper-parameter or a parameter has the wrong type. The optimizer is unchanged in either case.
        """
        if isinstance(param_group, dict):
            with naming(type(self).__name__):
                self.validate({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if self._may_leave_scaling and any(map(is_sharded, self.param_groups[-1]["params"])):
            self._step_supports_amp_scaling = False
        try:
            with naming(type(self).__name__):
                check_params(
                    self.param_groups[-1]["params"],
                    shards=self.elementwise,
                    scaled=self._step_supports_amp_scaling,
                )
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    @disable_dynamo
    def flat_grads(self) -> list[FlatGrads]:
        """The gradient buffers of all parameters, in order; fuses them if they are not.

        Raises:
            RuntimeError: Parameters are sharded over processes: their gradients are whole nowhere.
        """
        with torch.no_grad():
            self._fuse(for_step=False)
        if any(record.owners for record in self._fused):
            raise RuntimeError(
                f"{type(self).__name__} has parameters that are sharded over processes (DTensor), of whose gradients "
                "each buffer holds a part. Clip them with torch.nn.utils.clip_grad_norm_, which takes the norm over "
                "all processes"
            )
        return [fused.grads for fused in self.fused_groups()]

    def fused_groups(self) -> list[FusedGroup]:
        """What the last step has stepped: none before the first."""
        return [fused for record in self._fused for fused in record.groups]

    def clip_optimizer_grad_norm_fused(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of all parameters to a common norm, in one pass over each buffer.

        The same values as ``torch.nn.utils.clip_grad_norm_``, without a host sync. Before the first backward there is
        nothing to clip, and the norm is 0.

        Args:
            max_norm: Largest norm.
            norm_type: p of the p-norm.
            error_if_nonfinite: Raise where the norm is inf or nan.

        Returns:
            The norm before clipping, 0-dim.
        """
        return clip_grad_norm_(self.flat_grads(), (), max_norm, norm_type, error_if_nonfinite)

    def get_optimizer_combined_params(self) -> list[Tensor]:
        """The flat buffers that the parameters lie in, one per (param_group, device, dtype)."""
        self.flat_grads()
        return [fused.param_flat for fused in self.fused_groups()]

    def get_optimizer_combined_grads(self) -> list[Tensor]:
        """The flat buffers of the gradients, likewise. Parts whose gradient is None hold what was there last."""
        grads = self.flat_grads()
        for flat in grads:
            flat.gather()
        return [flat.flat for flat in grads]

    def get_optimizer_combined_grad_masks(self) -> list[Tensor]:
        """For each of these buffers float32 ones where there is a gradient now, and zeros elsewhere."""
        return [flat.mask() for flat in self.flat_grads()]

    # Without masters the model's parameters are the optimizer's; amp overrides these where they are not.
    clip_model_grad_norm_fused = clip_optimizer_grad_norm_fused
    get_model_combined_params = get_optimizer_combined_params
    get_model_combined_grads = get_optimizer_combined_grads
    get_model_combined_grad_masks = get_optimizer_combined_grad_masks

    # State dicts, copies

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` of this optimizer, or of torch.optim's with the same rule, has returned.

        State is copied, in the precision it was saved with: torch's own method would round it to a float16 parameter's.

        Raises:
            ValueError: Groups, parameters, shapes or hyper-parameters do not fit; the optimizer is unchanged.
        """
        loaded: dict[str, Any] = {}

        def check_and_capture(_: Optimizer, final: dict[str, Any]) -> None:
            check_state_dict(self, final)
            loaded.update(final)

        # The last of the pre-hooks, so that it sees what a user's own hooks have made of the state dict.
        handle = self.register_load_state_dict_pre_hook(check_and_capture)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for index, param in indexed_params(loaded, self.param_groups):
            for name, value in loaded["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    # A copy of what was saved: torch rounds to the parameter's dtype, or keeps sharing its memory.
                    target = param.device if value.dim() else value.device
                    self.state[param][name] = value.detach().to(target, copy=True)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                if name != "differentiable":  # torch's own, which no rule here has
                    group.setdefault(name, default)

    def __getstate__(self) -> dict[str, Any]:
        """What torch's optimizers pickle, and the flags that are not in ``defaults``."""
        flags = {name: getattr(self, name) for name in ("_step_supports_amp_scaling", "capturable", "set_grad_none")}
        return {**super().__getstate__(), **flags}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over ``state``. Buffers are never part of it: a copy fuses its own at its first step."""
        super().__setstate__(state)
        if "_fused" not in self.__dict__:
            self._forget_fusion()
            self._step_supports_amp_scaling = state.get("_step_supports_amp_scaling", False)
            self.capturable = state.get("capturable", False)
            self.set_grad_none = state.get("set_grad_none", True)

    # Fusion

    def _forget_fusion(self) -> None:
        self._fused: list[FusedParamGroup] = []
        self._shown = ShownState()

    def _fuse(self, *, for_step: bool = True) -> None:
        """Make every buffer match what the user now has; cheap where nothing has changed.

        Only a step has to know what has become of ``state``, unless buffers are made anew.
        """
        if is_capturing():
            self._check_current()  # parameters would move at once, and their values only when the graph is replayed
        del self._fused[len(self.param_groups) :]
        self._fused.extend(FusedParamGroup(capturable=self.capturable) for _ in self.param_groups[len(self._fused) :])
        changed = False
        with naming(type(self).__name__):
            # Again until nothing changes: fusing one group moves storages, and with them what other groups share.
            for _ in range(len(self.param_groups) + 1):
                if not any([self._follow(i, group) for i, group in enumerate(self.param_groups)]):
                    break
                changed = True
        if changed or (for_step and not self._shown.is_in(self.state)):
            self._shown.adopt(self, self._slots())

    def _follow(self, index: int, group: ParamGroup) -> bool:
        names = self.state_names(group)
        return self._fused[index].follow(group["params"], names, lambda moved: self._report(index, moved))

    def _report(self, index: int, moved: list[Tensor]) -> None:
        message = (
            f"{len(moved)} parameter(s) of group {index}, the first of shape {tuple(moved[0].shape)}, have left the "
            f"fused buffer of {type(self).__name__}: their data_ptr, size, stride, dtype or device has been changed"
        )
        if self.check_combined_tensors == "error":
            raise RuntimeError(f"{message}. Assign in place (p.copy_(...)), or drop check_combined_tensors='error'")
        if self.check_combined_tensors:
            print(f"Combined param has been destroyed and will be recombined afterwards: {message}.", flush=True)
        logger.info("%s; fusing again", message)

    def _slots(self) -> Iterator[StateSlot]:
        for group, record in zip(self.param_groups, self._fused, strict=True):
            for fused in record.groups:
                for index, part in enumerate(fused.params):
                    yield StateSlot(group, fused, index, record.owner_of(part))

    def _owners_of(self, parts: list[Tensor]) -> list[Tensor]:
        """The sharded parameters that any of ``parts`` are parts of."""
        return [
            record.owners[id(p)] for record in self._fused if record.owners for p in parts if id(p) in record.owners
        ]


@functools.lru_cache(maxsize=64)
def _steps_by_rule_alone(cls: Any) -> bool:
    rule = next(base for base in cls.__mro__ if "supports_capture" in vars(base))
    # torch puts a wrapper into each class; what amp adds is no FusedOptimizer, and knows of the flag.
    steps = [vars(base)["step"] for base in cls.__mro__ if issubclass(base, FusedOptimizer) and "step" in vars(base)]
    return (
        all(inspect.unwrap(step) is inspect.unwrap(FusedOptimizer.step) for step in steps)
        and cls.update is rule.update
        and cls.before_updates is rule.before_updates
    )
