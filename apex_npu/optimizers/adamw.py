# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Adam with decoupled weight decay, the rule of torch.optim.AdamW."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.optimizers.adam import NpuFusedAdam
from apex_npu.optimizers.base import FusedOptions


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
        options: See ``FusedOptions``.

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
        **options: Unpack[FusedOptions],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **options)
