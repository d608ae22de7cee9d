# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules for lists of tensors, where a device steps them in one launch: gradients need not be gathered for these."""

from __future__ import annotations

import torch
from torch import Tensor

from apex_npu.ops import npu


def takes_sgd_lists(device: torch.device, dtype: torch.dtype) -> bool:
    """True where ``sgd_list_`` steps parameters of ``dtype`` in one launch, however many there are."""
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
    """``sgd_`` for lists, with momentum and an L2 penalty; only where ``takes_sgd_lists``.

    Args:
        params: Updated in place.
        grads: One for each, with its size, strides and dtype.
        momentum_buffers: Likewise; updated in place.
        lr: Learning rate.
        momentum: Of the buffers; not 0.
        dampening: Of the gradient's share in them; 0 for ``nesterov``.
        weight_decay: L2 penalty.
        nesterov: Look ahead.
        maximize: Ascend instead.
        step: Number of this update, from 1.
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
