# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""RMSprop with the rule of torch.optim.RMSprop."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.ops import Call, rmsprop_
from apex_npu.optimizers.base import FusedOptimizer, FusedOptions, ParamGroup
from apex_npu.optimizers.checks import check_bools, check_non_negative


class NpuFusedRMSprop(FusedOptimizer):
    """RMSprop on flat buffers, with the rule and the results of torch.optim.RMSprop.

    ::

        g ← g + weight_decay · p
        s ← α · s + (1 − α) · g²
        a ← α · a + (1 − α) · g                    if centered
        d ← sqrt(s) + eps,  or  sqrt(s − a²) + eps  if centered
        b ← momentum · b + g / d;  p ← p − lr · b   with momentum,  else  p ← p − lr · g / d

    Tieleman & Hinton 2012, lecture 6.5; centered: Graves 2013, https://arxiv.org/abs/1308.0850.
    State: ``step``, ``square_avg`` s, with momentum ``momentum_buffer`` b, centered ``grad_avg`` a (shape and dtype of
    the parameter, float32 for float16 and bfloat16).

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        alpha: Smoothing constant α.
        eps: Added to the denominator.
        weight_decay: L2 penalty.
        momentum: Momentum factor.
        centered: Normalise by the variance rather than the second moment.
        maximize: Ascend the gradient instead.
        options: See ``FusedOptions``. With ``centered`` both averages stay float32.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.

    Example::

        >>> optimizer = optimizers.NpuFusedRMSprop(model.parameters(), lr=1e-2, momentum=0.9)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    eps_inside_sqrt: ClassVar[bool] = False
    elementwise = True
    encodable_states: ClassVar[tuple[str, ...]] = ("square_avg", "momentum_buffer", "grad_avg")
    supports_capture = True
    optional_states: ClassVar[tuple[str, ...]] = ("momentum_buffer", "grad_avg")
    torch_options: ClassVar[tuple[str, ...]] = ("foreach", "capturable", "differentiable")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_non_negative(group, "lr", "alpha", "eps", "weight_decay", "momentum")
        check_bools(group, "centered")

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the names of the second moment and of the states of momentum and centering, in torch's order."""
        momentum = ("momentum_buffer",) if group["momentum"] else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))

    def call(self, run: Run, group: ParamGroup) -> Call:
        """Bind the op of the rule to ``run``, with its arguments."""
        return rmsprop_.bind(
            run.param,
            run.scaled_grad,
            run.stored("square_avg"),
            run.stored("grad_avg") if group["centered"] else None,
            run.stored("momentum_buffer") if group["momentum"] else None,
            lr=self.learning_rate(run, group),
            alpha=group["alpha"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            eps_inside_sqrt=self.eps_inside_sqrt,
            decoupled=group.get("decoupled_decay", False),
            lr_in_momentum=group.get("lr_in_momentum", False),
            maximize=group["maximize"],
            grad_scale=run.grad_scale,
            found_inf=run.found_inf,
            encoding=run.encoding,
        )
