# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Adadelta with the rule of torch.optim.Adadelta."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.ops import Call, adadelta_
from apex_npu.optimizers.base import FusedOptimizer, FusedOptions, ParamGroup
from apex_npu.optimizers.checks import check_non_negative, check_unit_interval


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
        options: See ``FusedOptions``. States are kept in bfloat16 with ``"int8"``.

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
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_non_negative(group, "lr", "eps", "weight_decay")
        check_unit_interval("rho value", "rho", group["rho"], with_one=True)

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
