# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""LAMB: Adam's direction, with a step in proportion to the norm of each parameter; fused, and one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from apex_npu.backends import number_on
from apex_npu.fusion import Run
from apex_npu.ops import Call, lamb_, segment_add_, segment_dot, wide_dtype
from apex_npu.ops.reference import trust_ratio, update_moments_
from apex_npu.optimizers.base import FusedOptions, ParamGroup
from apex_npu.optimizers.checks import check_adam, check_bools, naming
from apex_npu.optimizers.state_dicts import copies_of_loaded
from apex_npu.optimizers.whole_norms import Addend, NormOptimizer, Parts

# The upper bound of parameter norms. You et al. clip them; common implementations use 10.
MAX_WEIGHT_NORM = 10.0


class NpuFusedLamb(NormOptimizer):
    """LAMB on flat buffers, without bias correction.

    ::

        g ← g / max(1, ‖g of all parameters‖)      if use_global_grad_norm
        m ← β₁ · m + (1 − β₁) · g
        v ← β₂ · v + (1 − β₂) · g²
        u ← m / (sqrt(v) + eps) + weight_decay · p
        r ← min(‖p‖, 10) / ‖u‖                     1 where either norm is 0, or with adam
        p ← p − lr · r · u

    with norms of each parameter. You et al. 2019, https://arxiv.org/abs/1904.00962, Algorithm 2 with φ(z) = min(z, 10).
    State: ``step``, ``exp_avg`` m, ``exp_avg_sq`` v (of the parameter's shape and dtype, but float32 for float16 and
    bfloat16).

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the denominator.
        weight_decay: Decay added to the direction.
        adam: Keep r at 1.
        use_global_grad_norm: Scale gradients down if their common norm exceeds 1. ``.grad`` is not written.
        maximize: Ascend the gradient instead.
        options: See ``FusedOptions``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.

    Example::

        >>> optimizer = optimizers.NpuFusedLamb(model.parameters(), lr=1e-3)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    encodable_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    supports_capture = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam": adam,
            "use_global_grad_norm": use_global_grad_norm,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_lamb(group)
        check_bools(group, "use_global_grad_norm")

    def before_updates(self, runs: list[tuple[Run, ParamGroup]]) -> None:
        """Compute the norm of all gradients, if a group needs it."""
        wanted = any(group["use_global_grad_norm"] for _, group in runs)
        self._grad_scales = times(runs, self.grad_norm(runs).clamp_min(1.0)) if wanted else {}

    def call(self, run: Run, group: ParamGroup) -> Call:
        """Bind the op of the rule to ``run``, with its arguments."""
        return lamb_.bind(
            run.param,
            run.scaled_grad,
            run.stored("exp_avg"),
            run.stored("exp_avg_sq"),
            run.scratch("direction"),
            *run.segments(),
            found_inf=run.found_inf,
            encoding=run.encoding,
            **self._options(run, group),
        )

    def parts(self, run: Run, group: ParamGroup) -> Parts:
        """Apply the rule, and yield the squared norms of each parameter and its direction."""
        return _parts(run, **self._options(run, group))

    def _options(self, run: Run, group: ParamGroup) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": self.learning_rate(run, group),
            "beta1": beta1,
            "beta2": beta2,
            "beta3": 1 - beta1,
            "eps": group["eps"],
            "decay": group["weight_decay"],
            "adapt": not group["adam"],
            "max_weight_norm": MAX_WEIGHT_NORM,
            "maximize": group["maximize"],
            "grad_scale": self._grad_scales[run.param.device] if group["use_global_grad_norm"] else run.grad_scale,
        }


def check_lamb(group: ParamGroup) -> None:
    """Check the hyper-parameters of ``NpuFusedLamb`` and ``Lamb``."""
    check_adam(group)
    check_bools(group, "adam")


def _parts(
    run: Run,
    *,
    lr: float | Tensor,
    adapt: bool,
    max_weight_norm: float,
    step: int | Tensor = 1,
    bias_correction: bool = False,
    maximize: bool = False,
    **options: Any,
) -> Parts:
    """Do the step of ``lamb_`` on parts of parameters. The arguments are those of ``lamb_``."""
    param, direction, segments = run.wide_param(), run.scratch("direction"), run.segments()
    exp_avg, exp_avg_sq = run.wide_state("exp_avg"), run.wide_state("exp_avg_sq")
    update_moments_(
        direction,
        param,
        run.flat_grad,
        exp_avg,
        exp_avg_sq,
        step=step,
        correct_first=bias_correction,
        correct_second=bias_correction,
        maximize=maximize,
        **options,
    )
    if adapt:
        squares = yield Addend(torch.stack([segment_dot(x, x, *segments) for x in (param, direction)]))
        segment_add_(param, direction, trust_ratio(squares, max_weight_norm) * -lr, *segments)
    elif isinstance(lr, Tensor):
        param.sub_(direction * lr)
    else:
        param.add_(direction, alpha=-lr)
    run.write_back(param, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


def times(runs: list[tuple[Run, ParamGroup]], divisor: Tensor) -> dict[torch.device, Tensor]:
    """Return the divisor of gradients on each device: ``divisor`` times their scale."""
    scales = {run.param.device: run.grad_scale for run, _ in runs}
    there = {device: number_on(divisor, device).reshape(1) for device in scales}
    return {device: there[device] if scale is None else scale * there[device] for device, scale in scales.items()}


class Lamb(Optimizer):
    """LAMB one tensor at a time: the rule of ``NpuFusedLamb``, for comparison and for tensors that cannot be fused.

    State: that of ``NpuFusedLamb``, and for inspection the values of the last step: ``weight_norm`` min(‖p‖, 10),
    ``adam_norm`` ‖u‖ and ``trust_ratio`` r, each 0-dim.

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the denominator.
        weight_decay: Decay added to the direction.
        adam: Keep r at 1.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.

    Example::

        >>> optimizer = optimizers.Lamb(model.parameters(), lr=1e-3)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam": adam}
        with naming("Lamb"):
            check_lamb(defaults)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Raises:
            RuntimeError: A gradient is sparse; nothing has been updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, _ in pairs:
            if p.grad.is_sparse:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} has a sparse gradient, which Lamb does not support; use "
                    "torch.optim.SparseAdam for it"
                )
        for p, group in pairs:
            self._step(p, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer or of ``NpuFusedLamb``.

        State of 16-bit parameters stays float32; torch's own method rounds it to their dtype.
        """
        loaded: dict[str, Any] = {}
        # The last pre-hook, so that it gets the state dict after users' hooks have changed it.
        handle = self.register_load_state_dict_pre_hook(lambda _, final: loaded.update(final))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for param, name, value in copies_of_loaded(self, loaded):
            dtype = torch.float32 if name == "step" else wide_dtype(param.dtype.to_real())
            self.state[param][name] = value.to(self.state[param][name].device, dtype)

    def _step(self, p: Tensor, group: ParamGroup) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[p]
        assert p.grad is not None
        # Complex numbers are pairs of real ones, as in torch.optim.
        weight, grad = (torch.view_as_real(t) if t.is_complex() else t for t in (p, p.grad))
        wide = wide_dtype(weight.dtype)
        param, grad = weight.to(wide), grad.to(wide)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        exp_avg = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        direction = exp_avg / exp_avg_sq.sqrt().add_(group["eps"])
        direction.add_(param, alpha=group["weight_decay"])
        weight_norm = torch.linalg.vector_norm(param).clamp_max(MAX_WEIGHT_NORM)
        adam_norm = torch.linalg.vector_norm(direction)
        usable = (weight_norm != 0) & (adam_norm != 0) & (not group["adam"])
        ratio = torch.where(usable, weight_norm / adam_norm, torch.ones_like(adam_norm))
        state["weight_norm"], state["adam_norm"], state["trust_ratio"] = weight_norm, adam_norm, ratio
        weight.copy_(param - direction * (ratio * float(group["lr"])))
