# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loop that all fused optimizers share. A subclass adds hyper-parameters, their checks and one ``update``."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import repeat, starmap
from operator import itemgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from apex_npu._cli import hooks
from apex_npu._extension import extension
from apex_npu.backends import is_capturing
from apex_npu.backends._torch_private import disable_dynamo, labelled, no_grad, torch_profiler
from apex_npu.fusion import FlatGrads, FusedGroup, Run, are_same, drop_grads, increment_versions, is_slot
from apex_npu.fusion.grad_memory import GradMemory
from apex_npu.fusion.grad_slots import IN_BUFFER, InPlace
from apex_npu.fusion.host_grads import sending
from apex_npu.fusion.storage import has_values, hold_values
from apex_npu.ops import Call, masks_writes
from apex_npu.ops.aten_fused import joined
from apex_npu.ops.cuda import prepared
from apex_npu.optimizers.capture import check_capture, check_captured_gradients, refusal
from apex_npu.optimizers.checks import (
    OfTorch,
    as_number,
    check_bool,
    check_of_torch,
    check_params,
    check_state_device,
    naming,
)
from apex_npu.optimizers.combined_accessors import CombinedAccessors
from apex_npu.optimizers.failed_steps import end_failed_step
from apex_npu.optimizers.fused_params import FusedParams
from apex_npu.optimizers.scaler_argument import grad_scaler_of, handing_over
from apex_npu.optimizers.shown_state import ShownState, StateSlot
from apex_npu.optimizers.state_dicts import StateDicts
from apex_npu.optimizers.state_formats import Remainders, StateDtype, StateFormats

logger = logging.getLogger("apex_npu")

ParamGroup = dict[str, Any]
_PARAMS = itemgetter("params")


class FusedOptions(OfTorch, total=False):
    """The keyword arguments of all fused optimizers. ``FusedOptimizer`` explains them.

    Attributes:
        fuse_grad_scaler: Let ``torch.amp.GradScaler.step`` leave unscaling and the overflow check to the step.
        capturable: Count steps on the device, so that a CUDA graph can capture a step. No effect on a CPU.
        state_dtype: The dtype of the states: torch.bfloat16 or ``"int8"``, for all or by name. None: float32.
        store_param_remainders: Keep the 16 bits that 16-bit parameters lack of float32, and step them exactly;
            ``"int8"``: keep 8 bits, rounded stochastically.
        stochastic_rounding: Round updated bfloat16 parameters stochastically.
        state_device: ``"cpu"`` keeps the state of parameters on an accelerator in host memory, and steps them there.
        fused: Of torch's optimizers. No effect.
        foreach: Of torch's optimizers. No effect.
        differentiable: Of torch's optimizers; must be False.

    Example::

        >>> options: optimizers.FusedOptions = {"state_dtype": "int8"}
        >>> optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3, **options)
    """

    fuse_grad_scaler: bool | None
    capturable: bool
    state_dtype: StateDtype
    store_param_remainders: Remainders
    stochastic_rounding: bool
    state_device: torch.device | str | None


class FusedOptimizer(CombinedAccessors, StateDicts):
    """A ``torch.optim.Optimizer`` that steps flat buffers instead of single tensors.

    Parameters, gradients and state of each device and dtype are in flat buffers. A step is one pass of one kernel over
    each, in one call for each param group. The first step moves the tensors into buffers; every Parameter keeps its
    identity. If tensors change (``p.data = …``, ``.to()``, ``load_state_dict``, ``add_param_group``, unfreezing), the
    next step detects this and uses the new values.

    Parameters in float16 and bfloat16 are updated in float32 arithmetic and rounded once; their state is float32.
    Parameters without a gradient and their step counts are unchanged, as in torch.optim.

    With ``fuse_grad_scaler=True``, ``torch.amp.GradScaler.step`` passes its scale and its overflow flag to the step,
    which unscales gradients as it reads them. ``.grad`` stays scaled, before and after the step. Call
    ``scaler.unscale_`` before clipping, as with torch's own fused optimizers.

    The rules of torch.optim also accept ``fused``, ``foreach`` and ``differentiable=False``, so that a call of torch's
    optimizer works unchanged. They have no effect.

    ``state_dtype`` stores states in fewer bytes than float32. It is ``torch.bfloat16``, ``"int8"`` (with one float32
    scale for 128 elements), or a dict from names of states to these. Rounding is stochastic, with random numbers that
    depend only on the step, the parameter and the element. ``optimizer.state`` then has objects with ``dequantize()``.
    ``state_dict()`` has float32 tensors, which load with every ``state_dtype``. If a format is too narrow for a rule,
    the state is stored in a wider one: docs/memory.md has the list.

    ``stochastic_rounding`` rounds bfloat16 parameters stochastically, which then need no masters.
    ``store_param_remainders=True`` keeps float32 values of 16-bit parameters in 2 bytes; ``state_dict()`` has these
    values as ``master_param``. ``"int8"`` keeps them in 1 byte, rounded stochastically. Use it without amp, which does
    the same at O2 and O5, and for 16-bit DTensors.

    ``state_device="cpu"`` keeps the state of parameters on a GPU or an NPU in host memory, and steps them there with
    the kernels of the CPU: gradients travel to the host, and parameters back. For parameters on a CPU it has no effect.
    It excludes ``capturable``, sharded parameters and combined buffers. docs/memory.md has the bytes.

    With ``capturable=True``, optimizers that take it can be captured in a CUDA graph, as torch's can. Steps are counted
    on the device, where ``state["step"]`` is. A learning rate that is a tensor on the device is read there. No step
    waits for the device; with ``fuse_grad_scaler`` this includes a GradScaler's flag. A capture must find everything
    as the previous step left it: take some steps first. On a CPU the option has no effect.

    Example::

        >>> class SignSGD(optimizers.FusedOptimizer):
        ...     def __init__(self, params, lr):
        ...         super().__init__(params, {"lr": lr})
        ...     def validate(self, group):
        ...         if not group["lr"] >= 0:
        ...             raise ValueError(f"lr must be >= 0, got {group['lr']}")
        ...     def state_names(self, group):
        ...         return ()
        ...     def update(self, run, group):
        ...         run.param.add_(run.grad.sign(), alpha=-group["lr"])
        >>> optimizer = SignSGD(model.parameters(), lr=1e-3)
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    is_npu_fused_optimizer = True
    # True if state_dict() has a `step` per parameter, as torch.optim's optimizer of the same rule does. If this depends
    # on the group, the rule overrides ``shows_step``.
    has_step_state: ClassVar[bool] = True
    # States that only some hyper-parameters need. A state dict may lack them.
    optional_states: ClassVar[tuple[str, ...]] = ()
    # States of one number for each parameter, rather than one for each element.
    scalar_states: ClassVar[tuple[str, ...]] = ()
    # True if no element's update depends on other elements, so that a part of a parameter can be stepped by itself.
    elementwise: ClassVar[bool] = False
    # True if a rule that is not elementwise has ``_update_parts``, so that it can step parts all the same.
    steps_parts: ClassVar[bool] = False
    # True if ``update`` accepts tensors as ``learning_rate``, ``run.step`` and ``run.found_inf``.
    supports_capture: ClassVar[bool] = False
    # True if ``update`` reads ``p.grad`` rather than ``run.grad``: gradients are unscaled in place before it.
    reads_param_grads: ClassVar[bool] = False
    # True if ``update`` reads ``run.wide_grad()``.
    reads_wide_grads: ClassVar[bool] = False
    # The states that can be kept in formats other than float32. The rule's ``update`` must only pass them to its own
    # op, or read ``run.wide_state`` and call ``run.write_back``.
    encodable_states: ClassVar[tuple[str, ...]] = ()
    # True with ``state_device="cpu"``.
    on_host: bool = False
    # True: print when parameters had to be fused again, and why; "error": raise instead.
    check_combined_tensors: bool | Literal["error"] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept subclasses with a ``_group_step``, as those of Ascend's optimizers; see ``compat/group_steps.py``.

        A subclass with its own ``update`` steps parts only with a method for parts of its own.
        """
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "_group_step"):
            hooks.group_steps().follow_group_step(cls)
        of_parts = {"parts", "_update_parts"}
        names = {"update", "call", "_group_step", *of_parts}
        owner = next(base for base in cls.__mro__ if names & vars(base).keys())
        cls.steps_parts = owner is not FusedOptimizer and bool(of_parts & vars(owner).keys())

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        fuse_grad_scaler: bool | None = False,  # None: the value of ``capturable``
        capturable: bool = False,
        set_grad_none: bool = True,
        state_dtype: StateDtype = None,
        store_param_remainders: Remainders = False,
        stochastic_rounding: bool = False,
        state_device: torch.device | str | None = None,
        **of_torch: Unpack[OfTorch],
    ) -> None:
        check_of_torch(type(self).__name__, of_torch)
        check_bool("fuse_grad_scaler", fuse_grad_scaler is None or fuse_grad_scaler)
        check_bool("capturable", capturable)
        if capturable and not self.supports_capture:
            raise ValueError(
                f"{type(self).__name__}: capturable=True: a CUDA graph cannot capture this rule; leave it out"
            )
        check_bool("set_grad_none", set_grad_none)
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        if hasattr(self, "_group_step"):
            hooks.group_steps().check_group_step(self)
        # torch.amp.GradScaler reads ``_step_supports_amp_scaling``.
        fuses = capturable if fuse_grad_scaler is None else fuse_grad_scaler
        self._step_supports_amp_scaling = fuses and not self.reads_param_grads
        with naming(type(self).__name__):
            self.state_formats = StateFormats.of(
                () if self.reads_param_grads else self.encodable_states,
                state_dtype=state_dtype,
                store_param_remainders=store_param_remainders,
                stochastic_rounding=stochastic_rounding,
            )
        self.on_host = check_state_device(type(self).__name__, state_device, capturable=capturable)
        self._forget_fusion()
        # Without a default learning rate every group must have one, which is checked when the group is added.
        if defaults.get("lr", 0.0) is not None:
            with naming(type(self).__name__):
                self.validate(defaults)
        super().__init__(params, defaults)

    # Methods that a rule overrides

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``. Errors say which is wrong, what is allowed and its value."""
        raise NotImplementedError(f"{type(self).__name__} must define validate(group)")

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the names of the states of ``group``, in the order of torch's state dict.

        By default they are ``encodable_states`` and ``scalar_states``.
        """
        if not self.encodable_states:
            raise NotImplementedError(f"{type(self).__name__} must define state_names(group)")
        return self.encodable_states + self.scalar_states

    def shows_step(self, group: ParamGroup) -> bool:
        """Return True if the states of ``group`` have a ``step``."""
        return self.has_step_state

    def widens_grads(self, group: ParamGroup) -> bool:
        """Return True if ``update`` of ``group`` reads ``run.grad``, which then has float32 for 16-bit gradients."""
        return self.reads_param_grads or self.reads_wide_grads or not self.encodable_states

    def group_defaults(self, group: ParamGroup) -> dict[str, Any]:
        """Return the default hyper-parameters of ``group``."""
        return self.defaults

    def initial_state(self, name: str, group: ParamGroup) -> float:
        """Return the value of the elements of state ``name`` before a parameter's first step."""
        return 0.0

    def before_updates(self, runs: list[tuple[Run, ParamGroup]]) -> None:
        """Compute values of all parameters together. Called once a step, with all runs, before the first ``update``."""

    def update(self, run: Run, group: ParamGroup) -> None:
        """Apply the rule to ``run``: flat ``param``, ``grad``, ``state(name)``, and ``step``, counted from 1.

        It must read ``run``'s buffers, and raise its errors (TypeError or ValueError), before it writes anything.

        It must not write ``run.grad``. Ops that take a ``grad_scale`` get ``run.scaled_grad`` and ``run.grad_scale``
        instead, which saves a pass.
        """
        op, operands, options = self.call(run, group)
        op(*operands, **options)

    def call(self, run: Run, group: ParamGroup) -> Call:
        """Return the op that ``update`` calls, with its arguments. It writes nothing.

        A rule may define this instead of ``update``. If a hyper-parameter of one group is wrong, no group is updated.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(run, group), or call(run, group)")

    def learning_rate(self, run: Run, group: ParamGroup) -> float | Tensor:
        """Return ``group["lr"]``: a tensor if it is on the device and the optimizer is capturable, else a float."""
        lr: float | Tensor = group["lr"]
        if type(lr) is float or (self.capturable and isinstance(lr, Tensor) and lr.device == run.param.device):
            return lr
        return as_number("lr of a parameter group", lr)

    # Methods that users call

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``step`` in hooks and a profiler range, as torch does. If neither is active, call it directly."""
        hooked = Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
            own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            of_all = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
            is_plain = not (torch_profiler._is_profiler_enabled or own or of_all)
            return func(self, *args, **kwargs) if is_plain else hooked(self, *args, **kwargs)

        return step

    @disable_dynamo
    @no_grad
    def step(self, closure: Callable[[], Any] | None = None, **older: Any) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Reevaluates the loss; called with gradients enabled, before the update.
            older: Only ``grad_scaler`` is accepted: a GradScaler that passes itself, as in old torch and in torch_npu.
                It is not in the signature, because torch's GradScaler passes itself if the signature has it.

        Returns:
            The value that the closure returned, or None.

        Raises:
            RuntimeError: A gradient is sparse, or of another dtype, or a CUDA graph is being captured that could not
                replay this step; nothing has been updated. Or a device has failed, or run out of memory, during an
                update: the message says that this step cannot be repeated.
            torch.OutOfMemoryError: There is no memory for state, and nothing has been updated; or memory ran out during
                an update, and the message says so.
            TypeError: The dtype of a parameter can no longer be fused, or an argument is unknown. Nothing has been
                updated.
        """
        scaler = grad_scaler_of(self, older) if older else None
        if (torch.cuda.is_initialized() or "torch_npu" in sys.modules) and is_capturing():
            check_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with nullcontext() if scaler is None else handing_over(self, scaler):
            self._step()
        return loss

    def _step(self) -> None:
        """Skip, or fuse, gather, count and update, in this order, so that errors come before any write."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and self.skips_on() != found_inf.device:
            if found_inf:
                for memory in self._lending:
                    memory.let_go()
                return
            found_inf = None
        if not self._is_fused(for_step=True):
            self._fuse_again(for_step=True)
        if self.capturable and is_capturing():
            check_captured_gradients(self)
        for hosted in self._fused.hosted:
            hosted.begin_step()
        # A gradient may alias a parameter, which is about to be written: it is copied unless it cannot alias one.
        in_place = InPlace.READ if self._all_in_slots else InPlace.WRITE
        gathered = [(fused, fused.grads.gather(in_place=in_place)) for fused in self._fused.groups]
        runs: list[tuple[Run, ParamGroup]] = []
        begun = updated = 0
        try:
            self._count(gathered, runs, found_inf)
            for hosted in self._fused.hosted if not self.elementwise else ():
                hosted.wait()
            self.before_updates(runs)
            for count, (update, operands, options) in self._updates(runs):
                begun += count
                update(*operands, **options)
                # Autograd does not see writes to the flat buffer. This lets it detect that a parameter has changed
                # between forward and backward.
                for run, _ in runs[updated:begun]:
                    increment_versions(run.params)
                updated = begun
        except BaseException as error:
            try:
                end_failed_step(type(self).__name__, [run for run, _ in runs], begun, updated, error)
            finally:
                self._shown.hide_unstepped(self)
            raise
        finally:
            for grads in self._fused.shards:
                grads.end_step()
            for memory in self._lending:
                memory.let_go()
        if self._shown.new:
            self._shown.remember(self, self._slots())

    def _updates(self, runs: list[tuple[Run, ParamGroup]]) -> list[tuple[int, Call]]:
        """Return the calls that update ``runs``, in order, each with the number of runs that it updates."""
        exchanges = self.steps_parts and bool(runs) and self._exchanges()
        overridden = getattr(self.update, "__func__", None) is not FusedOptimizer.update
        if overridden or exchanges:
            _check_learning_rates(runs)  # before the first of several updates
        if exchanges:
            return [(len(runs), (self._update_parts, (runs,), {}))]
        calls: list[Call] = [(self.update, pair, {}) for pair in runs] if overridden else list(starmap(self.call, runs))
        if overridden or self._fused.hosted:
            return [(1, call) for call in sending(self._fused.hosted, calls, runs)]
        if self._prepares:
            pairs = zip(calls, runs, strict=True)
            calls = [prepared(call, run.remember, elsewhere=run.elsewhere) for call, (run, _) in pairs]
        return joined(calls) if extension is None else list(zip(repeat(1), calls, strict=False))

    def _exchanges(self) -> bool:
        """Return True if a step exchanges numbers or parts with other processes."""
        return self.steps_parts and self._fused.is_any_sharded()

    def _update_parts(self, runs: list[tuple[Run, ParamGroup]]) -> None:
        """Update ``runs`` together, if parameters are sharded and the rule is not elementwise."""
        raise NotImplementedError

    def _count(
        self,
        gathered: list[tuple[FusedGroup, bytes]],
        runs: list[tuple[Run, ParamGroup]],
        found_inf: Tensor | None,
    ) -> None:
        """Count one step for all slots that have a gradient, and append their runs to ``runs``."""
        grad_scale = getattr(self, "grad_scale", None)
        groups, names = self.param_groups, self._fused.state_names
        for fused, states in gathered:
            first = fused.places[0][0]  # all have the same states
            counts = names[first] or fused.counts_always or self.shows_step(groups[first])
            addend: float | Tensor = 1.0 if counts else 0.0
            if found_inf is not None and addend:
                addend = (found_inf == 0).to(torch.float32)
            if not any(states):
                continue  # its runs stay for later steps
            scale = None if grad_scale is None else grad_scale.to(fused.param_flat.device, torch.float32).reshape(1)
            for run in fused.runs.cut(fused, states, partial(self._show_states, fused)):
                run.grad_scale, run.found_inf = scale, found_inf
                runs.append((run, groups[run.place[0]]))
            fused.runs.counts.add(fused.runs, addend)  # last, because it can be undone
        if len(gathered) > 1:
            # In the order of the lists, as in torch, since parameters may share memory.
            runs.sort(key=lambda pair: pair[0].place)

    def _show_states(self, fused: FusedGroup, positions: range) -> None:
        for slot in self._slots_of(fused, positions):
            self._shown.show_state(self, slot)

    @classmethod
    @functools.lru_cache(maxsize=64)
    def steps_by_rule_alone(cls) -> bool:
        """Return False if a subclass overrides ``step`` or ``update`` of the rule that sets ``supports_capture``."""
        rule: Any = next(base for base in cls.__mro__ if "supports_capture" in vars(base))
        # torch wraps step of each class. The class that amp adds is not a FusedOptimizer, and handles the flag.
        own = [vars(base) for base in cls.__mro__ if issubclass(base, FusedOptimizer)]
        return (
            all(inspect.unwrap(of["step"]) is inspect.unwrap(FusedOptimizer.step) for of in own if "step" in of)
            and cls.update is rule.update
            and cls.call is rule.call
            and cls.before_updates is rule.before_updates
        )

    def skips_on(self) -> torch.device | None:
        """Return the device that can skip a step by a flag that the host has not read; None if this is not possible."""
        if not self.capturable or self._exchanges():  # the host must know whether processes exchange anything
            return None
        devices = {p.device for group in self.param_groups for p in group["params"]}
        return devices.pop() if len(devices) == 1 and devices != {torch.device("cpu")} else None

    @disable_dynamo
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set all gradients to None, or with ``set_to_none=False`` fill existing gradients with zeros.

        The default is True as in torch; optimizers with NVIDIA's signature have ``set_grad_none`` for this choice.
        """
        set_to_none = self.set_grad_none if set_to_none is None else set_to_none
        if set_to_none:
            on = torch_profiler._is_profiler_enabled  # the range takes as long as all the rest
            with torch_profiler.record_function(self._zero_grad_profile_name) if on else nullcontext():  # as torch does
                for group in self.param_groups:
                    drop_grads(group["params"])
            self._fused.drop_parts()
        elif extension is None or not self._zero_slots():
            for grads in self._flat_grads:
                if grads.is_shown and not grads.broken():  # a script has the buffer, which then has the zeros, too
                    grads.gather()
            if not self._zero_in_place():
                super().zero_grad(set_to_none)
        for memory in self._lending:
            memory.let_go()

    @torch.no_grad()
    def _zero_in_place(self) -> bool:
        """Zero gradients in few calls; return False if some are not plain tensors, or have a graph."""
        params = [p for group in self.param_groups for p in group["params"]]
        if extension is not None:
            params = [params[i] for i in extension.zero_grads_cpu(params)]  # those that it has not zeroed
        found = [p.grad for p in params if p.grad is not None]
        if any(type(grad) is not Tensor or grad.requires_grad or grad.layout != torch.strided for grad in found):
            return False
        if found:
            torch._foreach_zero_(found)
        return True

    def _zero_slots(self) -> bool:
        """Zero the slots if all gradients are in them, and return True; else return False."""
        record, held = self._fused, self._flat_grads
        fits = self._all_fused and not record.unfused and not record.full_params and record.are_listed(self._lists())
        if not fits or any(grads.states().strip(bytes([IN_BUFFER])) for grads in held):
            return False
        for grads in held:
            grads.flat.zero_()
        return True

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters. The next step fuses them, and does not move parameters that are already fused.

        Raises:
            ValueError: A hyper-parameter is out of range, or the memory of a parameter has gaps.
            TypeError: A hyper-parameter or a parameter has the wrong type. The optimizer is unchanged in either case.
        """
        if isinstance(param_group, dict):
            check_of_torch(type(self).__name__, {"differentiable": param_group.get("differentiable")})
            with naming(type(self).__name__):
                self.validate({**self.group_defaults(param_group), **param_group})
        super().add_param_group(param_group)
        _drop_repeated(self.param_groups[-1])
        self.add_torch_options(self.param_groups[-1])
        try:
            with naming(type(self).__name__):
                params = self.param_groups[-1]["params"]
                check_params(params, shards=self.elementwise or self.steps_parts, on_host=self.on_host)
                self.state_formats.check(params)
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def flat_grads(self) -> list[FlatGrads]:
        """Return the gradient buffers of all parameters, in order. Fuses parameters that are not fused yet.

        Without the C++ extension the list is empty.
        """
        if not self._is_fused(for_step=False):
            self._fuse_outside_of_step()
        return self._flat_grads

    @disable_dynamo
    @no_grad
    def _fuse_outside_of_step(self) -> None:
        with self.moving_params():
            self._fuse_again(for_step=False)

    def fused_groups(self) -> list[FusedGroup]:
        """Return the fused groups of the last step; an empty list before the first."""
        return self._fused.groups

    @property
    def state_dtype(self) -> dict[str, torch.dtype]:
        """The dtypes of the states that are not float32: for ``"int8"`` int8 or uint8, for remainders int16 or int8.

        Raises:
            AttributeError: It is assigned.
        """
        groups, formats = self.param_groups, self.state_formats
        wider = formats.are_too_narrow(groups)
        each = (formats.kept_in(self.state_names(group), wider=wider) for group in groups)
        return {name: dtype for dtypes in each for name, dtype in dtypes.items()}

    @state_dtype.setter
    def state_dtype(self, value: object) -> None:
        raise AttributeError(
            f"state_dtype of {type(self).__name__} cannot be changed after construction, got {value!r}: make a new "
            "optimizer with it, and load the state_dict() of this one"
        )

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """The attributes that torch's optimizers pickle, and the flags that are not in ``defaults``."""
        names = ("_step_supports_amp_scaling", "capturable", "set_grad_none", "state_formats", "on_host")
        flags = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **flags}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``, which has no buffers. A copy makes its own at its first step."""
        super().__setstate__(state)
        if "_fused" not in self.__dict__:
            self._forget_fusion()
            self.state_formats.take_masters(self.state)

    # Fusion

    def _forget_fusion(self) -> None:
        self._fused = FusedParams(on_host=self.on_host, in_chunks=self.elementwise)
        self._flat_grads: list[FlatGrads] = []
        self._lending: list[GradMemory] = []
        self._shown = ShownState()
        self._all_in_slots = True
        self._all_fused = self._prepares = self._keeps_wider = False

    def _is_fused(self, *, for_step: bool) -> bool:
        """Return True if every buffer matches the user's tensors. ``state`` is compared only for a step."""
        record, groups = self._fused, self.param_groups
        if not self._all_fused or len(record.listed) != len(groups):
            return False
        if not all(map(are_same, map(_PARAMS, groups), record.listed)):
            return False
        if (record.full_params or record.unfused) and record.is_rarely_outdated():
            return False
        for fused in record.groups:
            if fused.kept:
                fused.release_kept()
            if fused.table.broken(fused.params):
                return False
        if not for_step:
            return True
        shown = self._shown
        return (
            list(map(self.state_names, groups)) == record.state_names
            and self.state_formats.are_too_narrow(groups) is self._keeps_wider
            and has_values(self.state, shown.entries)
            and hold_values(*shown.views)
            and not shown.table.broken(shown.tensors)
        )

    def _lists(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.param_groups]

    @labelled("amp.fuse")
    def _fuse_again(self, *, for_step: bool) -> None:
        if is_capturing():  # parameters would move now, but their values only when the graph is replayed
            raise refusal(type(self).__name__, "its parameters or its state have changed since the previous step")
        # After an error in what follows the next call repeats it, because new buffers may have no state yet.
        changed, self._all_fused = not self._all_fused, False
        self._fused.capturable = self.capturable
        with naming(type(self).__name__):
            # Repeat after a change, because fusing moves storages that groups in place may share.
            for stayed in (bool(self._fused.groups), False):
                if not self._fused.follow(self._lists(), list(map(self.state_names, self.param_groups)), self._report):
                    break
                changed = True
                if not stayed and all(fused.has_buffer for fused in self._fused.groups):
                    break
        self._end_fusing(with_state=changed or for_step)

    def _end_fusing(self, *, with_state: bool = True) -> None:
        groups, names = self._fused.groups, self._fused.state_names
        formats = self.state_formats
        with_state |= formats.apply(groups, self.param_groups, names, decodes_runs=not self.elementwise)
        self._keeps_wider = formats.are_too_narrow(self.param_groups)
        self._flat_grads = self._fused.buffered()
        self._lending = [grads.memory for grads in self._flat_grads if grads.memory.lends]
        # Aliases of parameters can be detected if all are in fused buffers.
        self._all_in_slots = all(all(map(is_slot, fused.params)) for fused in groups)
        self._prepares = all(masks_writes(fused.param_flat.device) for fused in groups)
        if with_state:
            self._shown.adopt(self, self._slots())
        self._all_fused = True

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
        for fused in self._fused.groups:
            yield from self._slots_of(fused, range(len(fused.params)))

    def _slots_of(self, fused: FusedGroup, positions: range) -> Iterator[StateSlot]:
        groups, names, own = self.param_groups, self._fused.state_names, fused.own_states
        for i in positions:
            index, param = fused.places[i][0], self._fused.full_param_of(fused.params[i])
            yield StateSlot(groups[index], fused, i, param, (*names[index], *own) if own else names[index])


def _check_learning_rates(runs: list[tuple[Run, ParamGroup]]) -> None:
    for _, group in runs:
        lr = group.get("lr", 0.0)  # rules of users may have none
        if not isinstance(lr, (float, Tensor)):
            as_number("lr of a parameter group", lr)


def _drop_repeated(group: ParamGroup) -> None:
    """Remove repeated parameters from ``group``, since each has one slot. torch has already warned about them."""
    first = {id(p): i for i, p in reversed(list(enumerate(group["params"])))}
    if len(first) < len(group["params"]):
        for name in group.keys() & {"params", "param_names"}:
            group[name] = [group[name][i] for i in sorted(first.values())]
