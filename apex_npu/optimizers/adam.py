# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Adam with L2 penalty, the rule of torch.optim.Adam."""

from __future__ import annotations

import inspect
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.ops import Call, adam_
from apex_npu.optimizers.base import FusedOptimizer, FusedOptions, ParamGroup
from apex_npu.optimizers.checks import check_adam, check_bools


class NpuFusedAdam(FusedOptimizer):
    """Adam on flat buffers, with the rule and the results of torch.optim.Adam.

    ::

        g ← g + weight_decay · p
        m ← β₁ · m + (1 − β₁) · g
        v ← β₂ · v + (1 − β₂) · g²
        p ← p − lr / (1 − β₁ᵗ) · m / (sqrt(v̂) / sqrt(1 − β₂ᵗ) + eps)

    where t counts a parameter's own steps. v̂ is v, or its running maximum with ``amsgrad``.
    Kingma & Ba 2014, https://arxiv.org/abs/1412.6980; AMSGrad: Reddi et al. 2018, https://arxiv.org/abs/1904.09237.

    State: ``step`` (float32, 0-dim; on the host unless ``capturable``), ``exp_avg`` m, ``exp_avg_sq`` v, with amsgrad
    ``max_exp_avg_sq`` (shape and dtype of the parameter, float32 for float16 and bfloat16).

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the denominator.
        weight_decay: L2 penalty.
        amsgrad: Use the maximum of all v so far.
        maximize: Ascend the gradient instead.
        decoupled_weight_decay: Must be False; ``NpuFusedAdamW`` has the decoupled decay.
        options: See ``FusedOptions``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.

    Example::

        >>> optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    decoupled: ClassVar[bool] = False
    elementwise = True
    encodable_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    supports_capture = True
    optional_states: ClassVar[tuple[str, ...]] = ("max_exp_avg_sq",)
    torch_options: ClassVar[tuple[str, ...]] = ("foreach", "capturable", "differentiable", "fused")
    # A key of torch's groups since 2.7.
    shows_decoupled: ClassVar[bool] = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        if decoupled_weight_decay:
            raise ValueError(f"{type(self).__name__}: decoupled_weight_decay=True requires NpuFusedAdamW; use it")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_adam(group)
        check_bools(group, "amsgrad")
        if group.get("decoupled_weight_decay") and not self.decoupled and group["weight_decay"]:
            raise ValueError(
                "decoupled_weight_decay=True, as in state dicts of torch.optim.AdamW, requires NpuFusedAdamW"
            )
        if group.get("decoupled_weight_decay") is False and self.decoupled and group["weight_decay"]:
            raise ValueError(
                "decoupled_weight_decay=False, as in state dicts of torch.optim.Adam, requires NpuFusedAdam"
            )

    def add_torch_options(self, group: ParamGroup) -> None:
        """Add torch's keys, including ``decoupled_weight_decay``, which differs between torch's Adam and AdamW."""
        super().add_torch_options(group)
        if self.shows_decoupled:
            # A loaded group may have the other value if its weight decay is 0, where both rules are equal.
            group["decoupled_weight_decay"] = self.decoupled

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the names of the first and second moment, and with amsgrad of the maximum of the second."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def call(self, run: Run, group: ParamGroup) -> Call:
        """Bind the op of the rule to ``run``, with its arguments."""
        beta1, beta2 = group["betas"]
        return adam_.bind(
            run.param,
            run.scaled_grad,
            run.stored("exp_avg"),
            run.stored("exp_avg_sq"),
            run.stored("max_exp_avg_sq") if group["amsgrad"] else None,
            lr=self.learning_rate(run, group),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.decoupled,
            maximize=group["maximize"],
            step=run.step,
            grad_scale=run.grad_scale,
            found_inf=run.found_inf,
            encoding=run.encoding,
        )
