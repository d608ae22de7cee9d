# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules that step lists of tensors in one launch, so that gradients need not be gathered first."""

from __future__ import annotations

import torch
from torch import Tensor

from apex_npu.ops import npu


def takes_sgd_lists(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``sgd_list_`` steps parameters of ``dtype`` in one launch, however many there are."""
    return device.type == "npu" and dtype == torch.float32 and npu.works("_fused_sgd_", device)


@torch.no_grad()
def sgd_list_(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    step: int,
) -> None:
    """Step lists of tensors as ``sgd_`` does, with momentum and an L2 penalty; call it only if ``takes_sgd_lists``.

    Args:
        params: The parameters, updated in place.
        grads: The gradients, with the sizes, strides and dtypes of the parameters.
        momentum_buffers: The momentum buffers, updated in place, with the sizes, strides and dtypes of the parameters.
        lr: The learning rate.
        momentum: The decay of the buffers; not 0.
        dampening: The share of the gradient that is left out; 0 with ``nesterov``.
        weight_decay: The L2 penalty.
        nesterov: Use Nesterov's momentum.
        maximize: Step along the gradient instead of against it.
        step: The number of this update, from 1.
    """
    torch._fused_sgd_(
        params,
        grads,
        momentum_buffers,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=step == 1,
    )
