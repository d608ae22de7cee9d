# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The operators of ``torch.nn.SyncBatchNorm``, which torch has for accelerators alone: there is no CPU kernel to run.

Statistics of float16 and bfloat16 inputs are float32, as on other devices. Each operator counts as the launches of its
parts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def register() -> torch.library.Library:
    """Give the device "npu" the operators, for as long as the library that is returned is kept."""
    library = torch.library.Library("aten", "IMPL")
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        library.impl(kernel.__name__, kernel, "PrivateUse1")
    return library


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _over(tensor: Tensor) -> list[int]:
    """All dimensions but the channels."""
    return [d for d in range(tensor.dim()) if d != 1]


def _along(values: Tensor, like: Tensor) -> Tensor:
    """A value of each channel, to be combined with ``like``."""
    return values.view([1, -1] + [1] * (like.dim() - 2))


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of each channel."""
    variance, mean = torch.var_mean(_wide(input), _over(input), correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same of all processes, whose own are rows of ``mean`` and ``invstd``; running statistics follow."""
    share = counts.to(mean.dtype).view(-1, 1)
    count = share.sum()
    mean_of_all = (mean * share).sum(0) / count
    squares = ((invstd.reciprocal().square() - eps + (mean - mean_of_all).square()) * share).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean_of_all.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((squares / (count - 1)).to(running_var.dtype), momentum)
    return mean_of_all, torch.rsqrt(squares / count + eps)


def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """``input``, normalized."""
    output = (_wide(input) - _along(mean, input)) * _along(invstd, input)
    if weight is not None:
        output = output * _along(weight, input)
    if bias is not None:
        output = output + _along(bias, input)
    return output.to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This process's sums of gradients, and of their products with centred inputs; gradients of weight and bias."""
    grad = _wide(grad_out)
    sum_dy = grad.sum(_over(grad))
    sum_dy_xmu = (grad * (_wide(input) - _along(mean, input))).sum(_over(grad))
    dtype = sum_dy.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype, copy=True)


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of ``input``, from the sums of all processes."""
    total = count.sum()
    centred = _wide(input) - _along(mean, input)
    projected = centred * _along(invstd.square() * sum_dy_xmu / total, input)
    factor = invstd if weight is None else invstd * weight
    grad = (_wide(grad_out) - _along(sum_dy / total, input) - projected) * _along(factor, input)
    return grad.to(input.dtype)
