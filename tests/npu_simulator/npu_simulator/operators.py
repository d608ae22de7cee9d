# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Operators that torch_npu adds to torch's, as formulas of torch's own operators: each is several launches here.

Arguments and refusals are those of torch_npu 2.13 where that was tried, on a CANN in host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_F = TypeVar("_F", bound=Callable[..., Any])
OPERATORS: dict[str, Callable[..., Any]] = {}


def _operator(function: _F) -> _F:
    """Make ``function`` an attribute of the stand-in; it refuses tensors of other devices."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values(), *kwargs.get("out", ())):
            if isinstance(value, Tensor) and value.device.type != "npu":
                raise RuntimeError(f"{function.__name__}: tensors must be on npu, got one on {value.device}")
        return function(*args, **kwargs)

    OPERATORS[function.__name__] = call
    return cast(_F, call)


def _check_matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise RuntimeError(f"{name} takes matrices, got a tensor of {tensor.dim()} dimensions")


@_operator
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_matrix("npu_linear", input)
    return F.linear(input, weight, bias)


@_operator
def fast_gelu(self: Tensor) -> Tensor:
    """The approximation x sigmoid(1.702 x), computed in float32."""
    wide = self.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(self.dtype)


@_operator
def npu_fast_gelu(self: Tensor) -> Tensor:
    return fast_gelu(self)


@_operator
def npu_confusion_transpose(self: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """Permuted, then reshaped to ``shape``; in the other order where ``transpose_first`` is False."""
    if transpose_first:
        return self.permute(tuple(perm)).reshape(tuple(shape))
    return self.reshape(tuple(shape)).permute(tuple(perm)).contiguous()


@_operator
def npu_bmmV2(self: Tensor, mat2: Tensor, output_sizes: Sequence[int] = ()) -> Tensor:
    result = torch.matmul(self, mat2)
    return result.reshape(tuple(output_sizes)) if output_sizes else result


@_operator
def npu_softmax_cross_entropy_with_logits(features: Tensor, labels: Tensor) -> Tensor:
    """Of each row, with probabilities as labels. Not differentiable with respect to the labels."""
    _check_matrix("npu_softmax_cross_entropy_with_logits", features)
    if labels.shape != features.shape:
        raise RuntimeError(
            f"labels must have the shape of features, {tuple(features.shape)}, got {tuple(labels.shape)}"
        )
    if labels.requires_grad:
        raise RuntimeError(
            "The function 'npu_softmax_cross_entropy_with_logits' is not differentiable with respect to argument "
            "'labels'. This input cannot have requires_grad True."
        )
    return -(labels * features.log_softmax(1)).sum(1)


@_operator
def npu_one_hot(
    input: Tensor, num_classes: int = -1, depth: int = 1, on_value: float = 1, off_value: float = 0
) -> Tensor:
    """In float32. ``num_classes`` is, in spite of its name, the dimension that is added."""
    is_on = input.unsqueeze(-1) == torch.arange(depth, device=input.device)
    off = torch.full(is_on.shape, float(off_value), device=input.device)
    return off.masked_fill(is_on, float(on_value)).movedim(-1, num_classes)


@_operator
def npu_bert_apply_adam(
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: float,
    global_grad_norm: float,
    weight_decay: float,
    step_size: float | None = None,
    adam_mode: int = 0,
    *,
    out: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of BERT's Adam, or with ``adam_mode=1`` of mBART's, written to ``out``: parameter, moments m and v.

    ::

        m ← beta1 · m + (1 − beta1) · grad
        v ← beta2 · v + (1 − beta2) · grad²
        var ← var − lr · (m / (sqrt(v) + epsilon) + weight_decay · var)                     for adam_mode 0
        var ← var − lr · weight_decay · var − step_size · m / (sqrt(v) + epsilon)           for adam_mode 1
    """
    if max_grad_norm > 0:
        raise NotImplementedError("npu_bert_apply_adam: clipping (max_grad_norm > 0) is not simulated")
    if adam_mode == 1 and step_size is None:
        raise RuntimeError("npu_bert_apply_adam: adam_mode 1 takes a step_size")
    var, m, v = out
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    direction = m / (v.sqrt() + epsilon)
    if adam_mode == 1:
        assert step_size is not None
        var.mul_(1 - lr * weight_decay).sub_(direction, alpha=step_size)
    else:
        var.sub_(direction.add_(var, alpha=weight_decay), alpha=lr)
    return var, m, v


@_operator
def dropout_with_byte_mask(self: Tensor, p: float, train: bool) -> Tensor:
    return F.dropout(self, p, train)


# ---- a bias in float32 beside halves, which torch's own convolutions refuse before they ask the device ---------------

_library: torch.library.Library | None = None


def _convolution(operator: torch._ops.OpOverload, input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    bias, *rest = rest or (None,)
    if bias is not None and bias.dtype == torch.float32 and input.dtype in (torch.float16, torch.bfloat16):
        bias = bias.to(input.dtype)
    result: Tensor = operator.decompose(input, weight, bias, *rest)
    return result


def take_float32_biases() -> None:
    """Let convolutions take them, as ``addmm`` and ``convolution`` do by themselves (``csrc/fallback.cpp``)."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for name in ("conv1d", "conv2d", "conv3d"):
        for overload in ("default", "padding"):
            operator = getattr(getattr(torch.ops.aten, name), overload)
            for key in ("PrivateUse1", "AutogradPrivateUse1"):
                _library.impl(operator, functools.partial(_convolution, operator), key)
