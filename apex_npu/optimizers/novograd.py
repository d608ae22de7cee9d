# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""NovoGrad with the signature of NVIDIA Apex."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.ops import segment_add_, segment_dot, sgd_
from apex_npu.optimizers.base import FusedOptions, ParamGroup
from apex_npu.optimizers.checks import as_number, check_adam, check_bools, check_no_amsgrad
from apex_npu.optimizers.whole_norms import Addend, NormOptimizer, Parts, alone


class FusedNovoGrad(NormOptimizer):
    """NovoGrad on flat buffers, with NVIDIA Apex's arguments and rule: one second moment for each parameter.

    ::

        v ← sqrt(β₂ · v² + (1 − β₂) · ‖g‖²)     norm_type 2
        v ← β₂ · v + (1 − β₂) · max |g|          norm_type 0
        d ← v / sqrt(1 − β₂ᵗ) + eps
        m ← β₁ · m + β₃ · (g / d + weight_decay · p);  p ← p − lr · m / (1 − β₁ᵗ)             reg_inside_moment
        m ← β₁ · m + β₃ · g;  p ← p − lr · (m / (1 − β₁ᵗ) / d + weight_decay · p)             else

    where β₃ is 1 − β₁ if grad_averaging, else 1. Without bias_correction t → ∞. A parameter's v starts at its first
    norm, or with init_zero at 0. Ginsburg et al. 2019, https://arxiv.org/abs/1905.11286;
    https://github.com/NVIDIA/apex.

    State: ``step``, ``exp_avg`` m (of the parameter's shape and dtype, but float32 for float16 and bfloat16),
    ``exp_avg_sq`` v (0-dim; a norm, not its square). State dicts of NVIDIA's optimizer, which keeps the norms in its
    groups, also load; they do not contain ``reg_inside_moment``.

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        bias_correction: Correct both moments for their start.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the denominator.
        weight_decay: Decay.
        amsgrad: Must be False.
        reg_inside_moment: Apply normalisation and decay before the momentum.
        grad_averaging: Multiply gradients by 1 − β₁ before they are added to m.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: Start v at 0.
        set_grad_none: Default of ``zero_grad(set_to_none=...)``.
        options: See ``FusedOptions``. ``state_dtype`` is that of ``exp_avg``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.
        RuntimeError: ``amsgrad`` is true.

    Example::

        >>> optimizer = optimizers.FusedNovoGrad(model.parameters(), lr=1e-2, betas=(0.95, 0.98))
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    encodable_states: ClassVar[tuple[str, ...]] = ("exp_avg",)
    reads_wide_grads = True
    scalar_states: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        **options: Unpack[FusedOptions],
    ) -> None:
        check_no_amsgrad("FusedNovoGrad", amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_adam(group)
        check_bools(group, "bias_correction", "reg_inside_moment", "grad_averaging", "init_zero")
        if group["norm_type"] not in (0, 2):
            raise ValueError(f"Invalid norm_type: {group['norm_type']!r} (2, or 0 for the largest absolute value)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of NVIDIA's.

        Raises:
            ValueError: Groups, parameters, shapes or hyper-parameters do not fit; the optimizer is unchanged.
        """
        super().load_state_dict(_with_norms_in_state(state_dict))

    def update(self, run: Run, group: ParamGroup) -> None:
        """Apply the rule."""
        alone(self.parts(run, group))

    def parts(self, run: Run, group: ParamGroup) -> Parts:
        """Apply the rule, and yield the norms of gradients."""
        beta1, beta2 = group["betas"]
        corrected = group["bias_correction"]
        bias_correction1 = 1 - beta1**run.step if corrected else 1.0
        bias_correction2 = 1 - beta2**run.step if corrected else 1.0
        beta3 = 1 - beta1 if group["grad_averaging"] else 1.0
        param, grad, exp_avg, segments = run.wide_param(), run.wide_grad(), run.wide_state("exp_avg"), run.segments()
        lr, weight_decay = as_number("lr of a parameter group", group["lr"]), group["weight_decay"]
        euclidean = group["norm_type"] == 2
        found = segment_dot(grad, grad, *segments) if euclidean else _largest(run, grad)
        found = (yield Addend(found.unsqueeze(0), largest=not euclidean))[0]
        norm = _update_norm(run, group, found.sqrt_() if euclidean else found, beta2)
        inverse = (norm / bias_correction2**0.5 + group["eps"]).reciprocal_()  # 1 / d
        exp_avg.mul_(beta1)
        if group["reg_inside_moment"]:
            exp_avg.add_(param, alpha=beta3 * weight_decay)
            segment_add_(exp_avg, grad, inverse.mul_(beta3), *segments)
            direction, lr, weight_decay = exp_avg, lr / bias_correction1, 0.0
        else:
            exp_avg.add_(grad, alpha=beta3)
            direction = run.scratch("direction").zero_()
            segment_add_(direction, exp_avg, inverse.div_(bias_correction1), *segments)
        sgd_(
            param,
            direction,
            None,
            lr=lr,
            momentum=0.0,
            dampening=0.0,
            weight_decay=weight_decay,
            decoupled=True,
            nesterov=False,
            maximize=False,
            step=2,
        )
        run.write_back(param, exp_avg=exp_avg)


def _with_norms_in_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` with the norm of each parameter in its own state.

    NVIDIA's groups have the norms of parameters with state in two tensors, for float16 and for float32 parameters.
    """
    if "param_groups" not in state_dict:
        return state_dict  # the caller raises the error
    groups, state = list(state_dict["param_groups"]), dict(state_dict["state"])
    for i, group in enumerate(groups):
        if "exp_avg_sq" not in group:
            continue
        groups[i] = {name: value for name, value in group.items() if name not in ("exp_avg_sq", "step")}
        members = [index for index in group["params"] if index in state]
        half = [state[index]["exp_avg"].dtype == torch.float16 for index in members]
        norms = group["exp_avg_sq"]
        sizes, expected = [len(norm) for norm in norms], [sum(half), len(half) - sum(half)]
        if sizes != expected:
            raise ValueError(
                f"FusedNovoGrad: group {i} of this state dict has exp_avg_sq for {sizes[0]} float16 and {sizes[1]} "
                f"float32 parameters, but {expected[0]} and {expected[1]} of them have state. Nothing has been loaded"
            )
        each = iter(norms[0]), iter(norms[1])
        for index, is_half in zip(members, half, strict=True):
            state[index] = {**state[index], "exp_avg_sq": next(each[0 if is_half else 1]), "step": group["step"]}
    return {**state_dict, "state": state, "param_groups": groups}


def _update_norm(run: Run, group: ParamGroup, norm: Tensor, beta2: float) -> Tensor:
    """Update v in place with ``norm``, the norms of this step's gradients, and return it."""
    exp_avg_sq = run.per_param("exp_avg_sq")
    if run.step == 1 and not group["init_zero"]:
        exp_avg_sq.copy_(norm)
    elif group["norm_type"] == 2:
        exp_avg_sq.square_().mul_(beta2).add_(norm.square(), alpha=1 - beta2).sqrt_()
    else:
        exp_avg_sq.mul_(beta2).add_(norm, alpha=1 - beta2)
    return exp_avg_sq


def _largest(run: Run, grad: Tensor) -> Tensor:
    """Return the largest absolute value of each parameter's gradient; 0 for an empty one."""
    members = run.members()
    filled = [grad[begin : begin + p.numel()] for p, begin in members if p.numel()]
    found = iter(torch._foreach_norm(filled, math.inf) if filled else ())
    return torch.stack([next(found) if p.numel() else grad.new_zeros(()) for p, _ in members])
