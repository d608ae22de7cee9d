# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The keyword arguments that fused optimizers have in common."""

from __future__ import annotations

import torch

from apex_npu.optimizers.checks import OfTorch
from apex_npu.optimizers.state_formats import Remainders, StateDtype


class FusedOptions(OfTorch, total=False):
    """The keyword arguments of all fused optimizers. ``FusedOptimizer`` explains them.

    Attributes:
        fuse_grad_scaler: Let ``torch.amp.GradScaler.step`` leave unscaling and the overflow check to the step.
        capturable: Count steps on the device, so that a CUDA graph can capture a step. No effect on a CPU.
        state_dtype: The dtype of the states: torch.bfloat16 or ``"int8"``, for all or by name. None: float32.
        store_param_remainders: Keep the 16 bits that 16-bit parameters lack of float32, and step them exactly;
            ``"int8"``: keep 8 bits, rounded stochastically.
        stochastic_rounding: Round updated bfloat16 parameters stochastically.
        state_device: ``"cpu"`` keeps the state of parameters on an accelerator in host memory, and steps them there.
        fused: Of torch's optimizers. No effect.
        foreach: Of torch's optimizers. No effect.
        differentiable: Of torch's optimizers; must be False.

    Example::

        >>> options: optimizers.FusedOptions = {"state_dtype": "int8"}
        >>> optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3, **options)
    """

    fuse_grad_scaler: bool | None
    capturable: bool
    state_dtype: StateDtype
    store_param_remainders: Remainders
    stochastic_rounding: bool
    state_device: torch.device | str | None
