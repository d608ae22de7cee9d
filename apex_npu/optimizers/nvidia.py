# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""NVIDIA Apex's FusedAdam, FusedSGD and FusedLAMB: its signatures with the rules of this package.

``fuse_grad_scaler=None`` means the value of ``capturable``, as in NVIDIA's FusedAdam.
https://github.com/NVIDIA/apex, apex/optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.ops import LOW_PRECISION, Call, adam_, chunks
from apex_npu.optimizers.base import FusedOptimizer, FusedOptions, ParamGroup
from apex_npu.optimizers.checks import check_adam, check_bool, check_bools, check_no_amsgrad, check_non_negative
from apex_npu.optimizers.lamb import NpuFusedLamb, times
from apex_npu.optimizers.sgd import NpuFusedSGD
from apex_npu.optimizers.state_dicts import count_in_group
from apex_npu.optimizers.state_formats import Remainders, StateDtype
from apex_npu.optimizers.whole_norms import NormOptimizer


class FusedAdam(FusedOptimizer):
    """Adam, or AdamW (``adam_w_mode``), on flat buffers, with NVIDIA Apex's arguments.

    The rule is that of ``NpuFusedAdam`` or ``NpuFusedAdamW``; without ``bias_correction`` both corrections are 1.
    Parameters in float16 and bfloat16 have float32 state. With ``master_weights`` it includes masters
    (``master_param``), which are stepped instead. A weight that was written since the last step is copied to its
    master. As in NVIDIA's optimizer, each parameter group also has the step count.

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        bias_correction: Correct both moments for their start.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the denominator.
        adam_w_mode: Decouple the weight decay.
        weight_decay: Decay.
        amsgrad: Must be False.
        set_grad_none: Default of ``zero_grad(set_to_none=...)``.
        capturable: Count steps on the device, so that a CUDA graph can capture a step. No effect on a CPU.
        master_weights: Keep float32 masters of float16 and bfloat16 parameters, unless amp does.
        fuse_grad_scaler: Let ``torch.amp.GradScaler.step`` leave unscaling and the overflow check to the step.
        exp_avg_dtype: Transformer Engine's name for ``state_dtype={"exp_avg": ...}``. ``"int8"`` is kept in bfloat16
            unless ``exp_avg_sq`` also has 8 bits.
        exp_avg_sq_dtype: Transformer Engine's name for ``state_dtype={"exp_avg_sq": ...}``.
        master_weight_dtype: Must be torch.float32.
        store_param_remainders: Instead of float32 masters keep only the 16 bits that float16 and bfloat16 parameters
            lack. ``master_weights`` is not needed. Parameters are rounded to nearest; halves are rounded away from zero
            in bfloat16, and to even in float16. Masters of float16 below 2⁻¹⁶ have an error of at most 2⁻³⁹.
            ``"int8"``: keep 8 bits, rounded stochastically.
        state_dtype: The dtype of the states: torch.bfloat16 or ``"int8"``, for all or by name. None: float32.
        stochastic_rounding: Round updated bfloat16 parameters stochastically.
        state_device: ``"cpu"`` keeps the state of parameters on an accelerator in host memory, and steps them there.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.
        RuntimeError: ``amsgrad`` is true.

    Example::

        >>> optimizer = optimizers.FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    elementwise = True
    encodable_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    supports_capture = True
    optional_states: ClassVar[tuple[str, ...]] = ("master_param",)  # NVIDIA's state dicts lack them

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        fuse_grad_scaler: bool | None = None,
        exp_avg_dtype: torch.dtype | str | None = None,
        exp_avg_sq_dtype: torch.dtype | str | None = None,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: Remainders = False,
        state_dtype: StateDtype = None,
        stochastic_rounding: bool = False,
        state_device: torch.device | str | None = None,
    ) -> None:
        check_no_amsgrad("FusedAdam", amsgrad)
        if master_weight_dtype != torch.float32:
            raise ValueError(
                f"FusedAdam: master_weight_dtype must be torch.float32, got {master_weight_dtype}; "
                "store_param_remainders=True keeps float32 masters of 16-bit parameters in 2 bytes"
            )
        by_name = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if any(kept is not None for kept in by_name.values()):
            if state_dtype is not None:
                raise ValueError("FusedAdam: pass state_dtype, or exp_avg_dtype and exp_avg_sq_dtype, not both")
            state_dtype = {name: kept for name, kept in by_name.items() if kept is not None}
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "master_weights": master_weights,
        }
        super().__init__(
            params,
            defaults,
            fuse_grad_scaler=fuse_grad_scaler,
            capturable=capturable,
            set_grad_none=set_grad_none,
            state_dtype=state_dtype,
            store_param_remainders=store_param_remainders,
            stochastic_rounding=stochastic_rounding,
            state_device=state_device,
        )

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_adam(group)
        check_bools(group, "bias_correction", "adam_w_mode", "master_weights")

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters. With ``capturable`` their learning rate becomes a tensor on their device, as in Apex."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        device = next((p.device for p in group["params"]), torch.device("cpu"))
        if self.capturable and device.type != "cpu":
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the names of the first and second moment, and of masters if a parameter has one."""
        keeps_masters = group["master_weights"] and not self.state_formats.has_remainders
        is_mastered = keeps_masters and any(map(_is_mastered, group["params"]))
        return ("exp_avg", "exp_avg_sq", "master_param") if is_mastered else ("exp_avg", "exp_avg_sq")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, of NVIDIA's, or of torch.optim's Adam or AdamW.

        Raises:
            ValueError: Groups, parameters, shapes or hyper-parameters do not fit; the optimizer is unchanged.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            count_in_group(self, group)

    def state_dict(self, *, encoded: bool = False) -> dict[str, Any]:
        """Return the state dict. If a group's step count is on the device, it is an int32 tensor, as in Apex.

        Instead of remainders it has masters and ``master_weights=True``, so that another optimizer steps them.
        """
        packed = super().state_dict(encoded=encoded)
        for group in packed["param_groups"]:
            if self.state_formats.has_remainders and not self.state_formats.widens_grads:  # not those of amp
                group["master_weights"] = True
            if isinstance(group.get("step"), Tensor):
                group["step"] = group["step"].to(torch.int32)
        return packed

    def before_updates(self, runs: list[tuple[Run, ParamGroup]]) -> None:
        """Set the step count of each group, as NVIDIA's optimizer does."""
        for run, group in runs:
            group["step"] = run.step

    def call(self, run: Run, group: ParamGroup) -> Call:
        """Bind the op of the rule to ``run``, with its arguments."""
        beta1, beta2 = group["betas"]
        call = adam_.bind(
            run.param,
            run.scaled_grad,
            run.stored("exp_avg"),
            run.stored("exp_avg_sq"),
            None,
            lr=self.learning_rate(run, group),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["adam_w_mode"],
            maximize=False,
            step=run.step,
            bias_correction=bool(group["bias_correction"]),
            grad_scale=run.grad_scale,
            found_inf=run.found_inf,
            encoding=run.encoding,
        )
        return on_masters(run, call) if "master_param" in self.state_names(group) else call


def _is_mastered(param: Tensor | int) -> bool:
    # The groups of a state dict have numbers; what they may have is in optional_states.
    return isinstance(param, Tensor) and param.requires_grad and param.dtype in LOW_PRECISION


def on_masters(run: Run, call: Call) -> Call:
    """``call``, which steps the parameters of ``run``, for their masters; parameters that need none are their own."""
    op, (_, *operands), options = call
    return _update_masters, (op, run, *operands), options


def _update_masters(op: Callable[..., None], run: Run, *operands: Any, **options: Any) -> None:
    if run.param.dtype not in LOW_PRECISION:  # of a group that has both
        op(run.param, *operands, **options)
        run.state("master_param").copy_(run.param)
        return
    masters = _current_masters(run)
    op(masters, *operands, **{**options, "encoding": run.encoding and run.encoding.of_states()})
    run.param.copy_(masters)


def _current_masters(run: Run) -> Tensor:
    """Return the masters of ``run``, after copying weights to them that were written since the last step.

    These are the weights to which their master does not round.
    """
    masters = run.state("master_param")
    for master, param in chunks((masters, run.param)):
        rounded = master.to(param.dtype)
        if param.is_cpu and torch.equal(rounded.view(torch.int16), param.view(torch.int16)):
            continue  # on other devices this check would wait
        torch.where(rounded == param, master, param.to(master.dtype), out=master)
    return masters


class FusedSGD(NpuFusedSGD):
    """SGD on flat buffers, with NVIDIA Apex's arguments and the rule of ``NpuFusedSGD``.

    With ``wd_after_momentum`` weight decay is added to the step instead of to the gradient.

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate; required.
        momentum: Momentum factor.
        dampening: Dampening of the momentum.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum; needs a momentum and no dampening.
        wd_after_momentum: Decay after the momentum.
        materialize_master_grads: Accepted; it has no effect.
        set_grad_none: Default of ``zero_grad(set_to_none=...)``; False as in Apex.
        options: See ``FusedOptions``. ``fuse_grad_scaler`` is by default the value of ``capturable``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number, or ``lr`` is missing.

    Example::

        >>> optimizer = optimizers.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        options.setdefault("fuse_grad_scaler", None)
        check_bool("materialize_master_grads", materialize_master_grads)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": False,
            "wd_after_momentum": wd_after_momentum,
        }
        # Not NpuFusedSGD.__init__, whose arguments differ.
        FusedOptimizer.__init__(self, params, defaults, set_grad_none=set_grad_none, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        if group["lr"] is None:
            raise TypeError("FusedSGD has no default learning rate: pass lr, for example lr=0.1")
        super().validate(group)
        check_bools(group, "wd_after_momentum")


class FusedLAMB(NpuFusedLamb):
    """LAMB on flat buffers, with NVIDIA Apex's arguments and rule.

    ::

        g ← g / max(1, ‖g of all parameters‖ / max_grad_norm)
        g ← g + weight_decay · p                      unless adam_w_mode
        m ← β₁ · m + β₃ · g                           β₃ = 1 − β₁ if grad_averaging, else 1
        v ← β₂ · v + (1 − β₂) · g²
        u ← m̂ / (sqrt(v̂) + eps) [+ weight_decay · p   if adam_w_mode]
        p ← p − lr · ‖p‖ / ‖u‖ · u                    for each parameter; ratio 1 where either norm is 0, and, unless
                                                      use_nvlamb, in groups without weight decay

    You et al. 2019, https://arxiv.org/abs/1904.00962. State: ``step``, ``exp_avg`` m, ``exp_avg_sq`` v (of the
    parameter's shape and dtype, but float32 for float16 and bfloat16).

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        bias_correction: Correct both moments for their start.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the denominator.
        weight_decay: Decay.
        amsgrad: Must be False.
        adam_w_mode: Add the decay to the direction instead of to the gradient.
        grad_averaging: Multiply gradients by 1 − β₁ before they are added to m.
        set_grad_none: Default of ``zero_grad(set_to_none=...)``.
        max_grad_norm: Norm of all gradients above which they are scaled down. ``.grad`` is not written. The value of
            the constructor applies to all groups.
        use_nvlamb: Also adapt the steps of parameters without weight decay.
        options: See ``FusedOptions``. ``fuse_grad_scaler`` is by default the value of ``capturable``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.
        RuntimeError: ``amsgrad`` is true.

    Example::

        >>> optimizer = optimizers.FusedLAMB(model.parameters(), lr=2e-3, max_grad_norm=1.0)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    supports_capture = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        options.setdefault("fuse_grad_scaler", None)
        check_no_amsgrad("FusedLAMB", amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "adam_w_mode": adam_w_mode,
            "use_nvlamb": use_nvlamb,
        }
        # Not NpuFusedLamb.__init__, whose arguments differ.
        NormOptimizer.__init__(self, params, defaults, set_grad_none=set_grad_none, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_adam(group)
        check_non_negative(group, "max_grad_norm")
        check_bools(group, "bias_correction", "adam_w_mode", "grad_averaging", "use_nvlamb")

    def before_updates(self, runs: list[tuple[Run, ParamGroup]]) -> None:
        """Compute the norm of all gradients."""
        max_norm = self.defaults["max_grad_norm"]
        divides = bool(runs) and max_norm > 0
        self._grad_scales = times(runs, (self.grad_norm(runs) / max_norm).clamp_min_(1.0)) if divides else {}

    def _options(self, run: Run, group: ParamGroup) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        decay, decoupled = group["weight_decay"], group["adam_w_mode"]
        return {
            "lr": self.learning_rate(run, group),
            "beta1": beta1,
            "beta2": beta2,
            "beta3": 1 - beta1 if group["grad_averaging"] else 1.0,
            "eps": group["eps"],
            "step": run.step,
            "bias_correction": bool(group["bias_correction"]),
            "l2": 0.0 if decoupled else decay,
            "decay": decay if decoupled else 0.0,
            "adapt": bool(decay or group["use_nvlamb"]),
            "max_weight_norm": math.inf,
            "grad_scale": self._grad_scales.get(run.param.device, run.grad_scale),
        }
