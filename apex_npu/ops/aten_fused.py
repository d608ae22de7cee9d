# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's own fused kernels on flat buffers: one call, one pass. They take one dtype; else there is the reference.

On a single flat tensor torch's CPU kernels come close to the memory's speed, which a list of small tensors does not let
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex_npu.ops import reference


def _one_dtype(*tensors: Tensor | None) -> bool:
    return len({t.dtype for t in tensors if t is not None}) == 1


def sgd_(param: Tensor, grad: Tensor, momentum_buffer: Tensor | None, *, first: bool, **options: Any) -> None:
    """See ``apex_npu.ops.schemas.sgd_``."""
    if not _one_dtype(param, grad, momentum_buffer) or param.dtype in reference.LOW_PRECISION:
        reference.sgd_(param, grad, momentum_buffer, first=first, **options)
        return
    buffers = [] if momentum_buffer is None else [momentum_buffer]
    if momentum_buffer is None:
        options = {**options, "momentum": 0.0, "nesterov": False}  # torch would look for the buffer
    torch._fused_sgd_([param], [grad], buffers, is_first_step=first, found_inf=None, **options)


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    *,
    decoupled: bool,
    step: int,
    **options: Any,
) -> None:
    """See ``apex_npu.ops.schemas.adam_``."""
    if not _one_dtype(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq):
        reference.adam_(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, decoupled=decoupled, step=step, **options)
        return
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [] if max_exp_avg_sq is None else [max_exp_avg_sq],
        [torch.full((), float(step), dtype=torch.float32, device=param.device)],
        amsgrad=max_exp_avg_sq is not None,
        found_inf=None,
        **options,
    )
