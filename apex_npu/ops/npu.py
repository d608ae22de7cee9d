# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fused kernels of Ascend's CANN, where this torch_npu has them: one launch for what the reference needs eight for.

``npu_apply_adam_w`` (https://gitee.com/ascend/op-plugin) is AdamW's rule; without decay, Adam's. For AMSGrad it is not
used: whether it keeps the maximum is not documented.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from apex_npu.ops import aten_fused, reference


@functools.cache
def has_apply_adam_w() -> bool:
    """True where torch_npu has brought its AdamW kernel."""
    return hasattr(torch.ops.npu, "npu_apply_adam_w")


@functools.cache
def has_aten_kernel(name: str) -> bool:
    """True where torch_npu has a kernel of its own for ``aten::name``, one of torch's fused optimizers."""
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "PrivateUse1")
    return has_kernel


def sgd_(param: Tensor, *args: Any, **options: Any) -> None:
    """See ``apex_npu.ops.elementwise.sgd_``."""
    module = aten_fused if has_aten_kernel("_fused_sgd_") else reference
    module.sgd_(param, *args, **options)


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    model_param: Tensor | None = None,
    *,
    decoupled: bool,
    **options: Any,
) -> None:
    """See ``apex_npu.ops.elementwise.adam_``."""
    one_dtype = param.dtype == grad.dtype == exp_avg.dtype == torch.float32
    if one_dtype and max_exp_avg_sq is None and has_apply_adam_w():
        for p, g, m, v in reference.chunks((param, grad, exp_avg, exp_avg_sq)):
            _apply_adam_w(p, g, m, v, decoupled=decoupled, **options)
        if model_param is not None:
            model_param.copy_(param)
        return
    module = aten_fused if has_aten_kernel("_fused_adamw_" if decoupled else "_fused_adam_") else reference
    module.adam_(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, model_param, decoupled=decoupled, **options)


def _apply_adam_w(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    step: int,
    bias_correction: bool = True,
    grad_scale: Tensor | None = None,
) -> None:
    l2 = 0.0 if decoupled else weight_decay
    grad = reference.in_dtype(grad, grad.dtype, maximize and bool(l2), grad_scale)
    if l2:
        grad = grad.add(param, alpha=l2)
    # The kernel would take 1 − beta2^step in float32, which for the first steps has five digits: it is told that there
    # is nothing to correct (powers of 0), and gets a learning rate and an eps that amount to the same.
    bias_correction1, root2 = (1 - beta1**step, (1 - beta2**step) ** 0.5) if bias_correction else (1.0, 1.0)
    step_size = lr * root2 / bias_correction1
    decay = weight_decay * bias_correction1 / root2 if decoupled else 0.0
    flips = maximize and not l2
    torch.ops.npu.npu_apply_adam_w(
        0.0,
        0.0,
        step_size,
        decay,
        beta1,
        beta2,
        eps * root2,
        grad,
        None,
        False,
        flips,
        var=param,
        m=exp_avg,
        v=exp_avg_sq,
    )
