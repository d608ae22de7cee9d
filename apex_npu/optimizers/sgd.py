# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Stochastic gradient descent with momentum, the rule of torch.optim.SGD."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.ops import Call, sgd_
from apex_npu.optimizers.base import FusedOptimizer, FusedOptions, ParamGroup
from apex_npu.optimizers.checks import as_number, check_bools, check_non_negative


class NpuFusedSGD(FusedOptimizer):
    """SGD on flat buffers, with the rule and the results of torch.optim.SGD.

    ::

        g ← g + weight_decay · p
        b ← g                                   at a parameter's first step
        b ← momentum · b + (1 − dampening) · g  later
        p ← p − lr · (g + momentum · b  if nesterov else  b)

    State: ``momentum_buffer`` (shape and dtype of the parameter, float32 for float16 and bfloat16), only with momentum.
    Nesterov momentum after Sutskever et al. 2013, http://proceedings.mlr.press/v28/sutskever13.html.

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening of the momentum.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum; needs a momentum and no dampening.
        maximize: Ascend the gradient instead.
        options: See ``FusedOptions``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    has_step_state = False
    elementwise = True
    encodable_states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    supports_capture = True
    optional_states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    torch_options: ClassVar[tuple[str, ...]] = ("foreach", "differentiable", "fused")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_non_negative(group, "lr", "momentum", "weight_decay")
        as_number("dampening", group["dampening"])
        check_bools(group, "nesterov")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the name of the momentum buffer, if there is momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def call(self, run: Run, group: ParamGroup) -> Call:
        """Bind the op of the rule to ``run``, with its arguments."""
        return sgd_.bind(
            run.param,
            run.scaled_grad,
            run.stored("momentum_buffer") if group["momentum"] else None,
            lr=self.learning_rate(run, group),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            step=run.step,
            decoupled=group.get("wd_after_momentum", False),
            grad_scale=run.grad_scale,
            found_inf=run.found_inf,
            encoding=run.encoding,
        )
