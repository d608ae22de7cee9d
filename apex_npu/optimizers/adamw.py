# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Adam with decoupled weight decay, the rule of torch.optim.AdamW."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.optimizers.adam import NpuFusedAdam
from apex_npu.optimizers.checks import OfTorch
from apex_npu.optimizers.state_formats import Remainders, StateDtype


class NpuFusedAdamW(NpuFusedAdam):
    """AdamW on flat buffers, with the rule and the results of torch.optim.AdamW.

    It is ``NpuFusedAdam`` with decoupled decay::

        p ← p − lr · weight_decay · p,   then Adam's rule with the gradient alone.

    Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101. State, shapes, dtypes and errors are ``NpuFusedAdam``'s.

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the denominator.
        weight_decay: Decay rate per unit of ``lr``.
        amsgrad: Use the maximum of all v so far.
        maximize: Ascend the gradient instead.
        fuse_grad_scaler: Let ``torch.amp.GradScaler.step`` leave unscaling and the overflow check to the step.
        capturable: Count steps on the device, so that a CUDA graph can capture a step. No effect on a CPU.
        state_dtype: The dtype of the states: torch.bfloat16 or ``"int8"``, for all or by name. None: float32.
        store_param_remainders: Keep the 16 bits that 16-bit parameters lack of float32, and step them exactly;
            ``"int8"``: keep 8 bits, rounded stochastically.
        stochastic_rounding: Round updated bfloat16 parameters stochastically.
        state_device: ``"cpu"`` keeps the state of parameters on an accelerator in host memory, and steps them there.
        of_torch: ``fused``, ``foreach`` and ``differentiable=False`` of torch's optimizer. No effect.

    Example::

        >>> optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            fuse_grad_scaler=fuse_grad_scaler,
            capturable=capturable,
            state_dtype=state_dtype,
            store_param_remainders=store_param_remainders,
            stochastic_rounding=stochastic_rounding,
            state_device=state_device,
            **of_torch,
        )
