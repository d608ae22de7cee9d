# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Adadelta with the rule of torch.optim.Adadelta."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.ops import Call, adadelta_
from apex_npu.optimizers.base import FusedOptimizer, ParamGroup
from apex_npu.optimizers.checks import OfTorch, check_non_negative, check_unit_interval
from apex_npu.optimizers.state_formats import Remainders, StateDtype


class NpuFusedAdadelta(FusedOptimizer):
    """Adadelta on flat buffers, with the rule and the results of torch.optim.Adadelta.

    ::

        g ← g + weight_decay · p
        s ← ρ · s + (1 − ρ) · g²
        δ ← sqrt(a + eps) / sqrt(s + eps) · g
        a ← ρ · a + (1 − ρ) · δ²
        p ← p − lr · δ

    Zeiler 2012, https://arxiv.org/abs/1212.5701. State: ``step``, ``square_avg`` s, ``acc_delta`` a (shape and dtype of
    the parameter, float32 for float16 and bfloat16).

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Factor of the step.
        rho: ρ, in [0, 1].
        eps: Added under both roots.
        weight_decay: L2 penalty.
        maximize: Ascend the gradient instead.
        fuse_grad_scaler: Let ``torch.amp.GradScaler.step`` leave unscaling and the overflow check to the step.
        capturable: Count steps on the device, so that a CUDA graph can capture a step. No effect on a CPU.
        state_dtype: The dtype of the states: torch.bfloat16 or ``"int8"``, which is kept in bfloat16. None: float32.
        store_param_remainders: Keep the 16 bits that 16-bit parameters lack of float32, and step them exactly;
            ``"int8"``: keep 8 bits, rounded stochastically.
        stochastic_rounding: Round updated bfloat16 parameters stochastically.
        state_device: ``"cpu"`` keeps the state of parameters on an accelerator in host memory, and steps them there.
        of_torch: ``fused``, ``foreach`` and ``differentiable=False`` of torch's optimizer. No effect.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.

    Example::

        >>> optimizer = optimizers.NpuFusedAdadelta(model.parameters(), lr=1.0)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    elementwise = True
    encodable_states: ClassVar[tuple[str, ...]] = ("square_avg", "acc_delta")
    supports_capture = True
    torch_options: ClassVar[tuple[str, ...]] = ("foreach", "capturable", "differentiable")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        fuse_grad_scaler: bool = False,
        capturable: bool = False,
        state_dtype: StateDtype = None,
        store_param_remainders: Remainders = False,
        stochastic_rounding: bool = False,
        state_device: torch.device | str | None = None,
        **of_torch: Unpack[OfTorch],
    ) -> None:
        defaults = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults,
            fuse_grad_scaler=fuse_grad_scaler,
            capturable=capturable,
            state_dtype=state_dtype,
            store_param_remainders=store_param_remainders,
            stochastic_rounding=stochastic_rounding,
            state_device=state_device,
            **of_torch,
        )

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_non_negative("learning rate", "lr", group["lr"])
        check_unit_interval("rho value", "rho", group["rho"])
        check_non_negative("epsilon value", "eps", group["eps"])
        check_non_negative("weight_decay value", "weight_decay", group["weight_decay"])

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the names of the averages of squared gradients and of squared steps."""
        return ("square_avg", "acc_delta")

    def call(self, run: Run, group: ParamGroup) -> Call:
        """Bind the op of the rule to ``run``, with its arguments."""
        return adadelta_.bind(
            run.param,
            run.scaled_grad,
            run.stored("square_avg"),
            run.stored("acc_delta"),
            lr=self.learning_rate(run, group),
            rho=group["rho"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            grad_scale=run.grad_scale,
            found_inf=run.found_inf,
            encoding=run.encoding,
        )
