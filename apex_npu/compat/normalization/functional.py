# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The functions that the layers call. ``memory_efficient`` is accepted everywhere and has no effect."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = int | Sequence[int]


def _shape(normalized_shape: Shape) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """(x − E[x]) / √(Var[x] + eps) over the last dimensions.

    Example::

        >>> output = normalization.fused_layer_norm(torch.randn(8, 64), (64,))
    """
    return F.layer_norm(input, _shape(normalized_shape), None, None, eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | Shape,
    bias: Tensor,
    normalized_shape: Shape | Tensor,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm, times ``weight`` plus ``bias``; in the dtype of ``input``.

    The order of 2020, ``(input, normalized_shape, weight, bias)``, is understood, too.

    Example::

        >>> weight, bias = torch.ones(64), torch.zeros(64)
        >>> output = normalization.fused_layer_norm_affine(torch.randn(8, 64), weight, bias, (64,))
    """
    if not isinstance(weight, Tensor):
        weight, bias, normalized_shape = bias, cast(Tensor, normalized_shape), weight
    return F.layer_norm(input, _shape(cast(Shape, normalized_shape)), weight, bias, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm in the dtype of ``weight``, computed in the wider one of input's and weight's.

    Example::

        >>> weight, bias = torch.ones(64), torch.zeros(64)
        >>> input = torch.randn(8, 64).bfloat16()
        >>> normalization.mixed_dtype_fused_layer_norm_affine(input, weight, bias, (64,)).dtype
        torch.float32
    """
    wide = torch.promote_types(input.dtype, weight.dtype)
    return F.layer_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), bias.to(wide), eps).to(weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """X / √(E[x²] + eps) over the last dimensions.

    Example::

        >>> output = normalization.fused_rms_norm(torch.randn(8, 64), (64,))
    """
    return F.rms_norm(input, _shape(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm times ``weight``.

    Example::

        >>> output = normalization.fused_rms_norm_affine(torch.randn(8, 64), torch.ones(64), (64,))
    """
    return F.rms_norm(input, _shape(normalized_shape), weight, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm in the dtype of ``weight``, computed in the wider one of input's and weight's.

    Example::

        >>> input = torch.randn(8, 64).bfloat16()
        >>> normalization.mixed_dtype_fused_rms_norm_affine(input, torch.ones(64), (64,)).dtype
        torch.float32
    """
    wide = torch.promote_types(input.dtype, weight.dtype)
    return F.rms_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), eps).to(weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm, times ``weight`` where there is one; in the dtype of ``weight``.

    Example::

        >>> output = normalization.manual_rms_norm(torch.randn(8, 64), (64,), torch.ones(64), 1e-5)
    """
    if weight is None:
        return fused_rms_norm(input, normalized_shape, eps)
    return mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps)


def _forward(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` as the ``forward`` of Apex's autograd function, with a context first.

    Megatron-LM looks for ``memory_efficient`` among its arguments (``inspect.getfullargspec``).
    """

    @functools.wraps(function)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function)
    vars(forward)["__signature__"] = signature.replace(parameters=[context, *signature.parameters.values()])
    return forward


class FusedLayerNormFunction:
    """``fused_layer_norm`` by its name in Apex, where it is an autograd function.

    Example::

        >>> output = normalization.FusedLayerNormFunction.apply(torch.randn(8, 64), (64,), 1e-5)
    """

    apply = staticmethod(fused_layer_norm)
    forward = staticmethod(_forward(fused_layer_norm))


class FusedLayerNormAffineFunction:
    """``fused_layer_norm_affine``, likewise.

    Example::

        >>> input, weight, bias = torch.randn(8, 64), torch.ones(64), torch.zeros(64)
        >>> norm = normalization.FusedLayerNormAffineFunction
        >>> output = norm.apply(input, weight, bias, (64,), 1e-5)
    """

    apply = staticmethod(fused_layer_norm_affine)
    forward = staticmethod(_forward(fused_layer_norm_affine))


class FusedLayerNormAffineMixedDtypesFunction:
    """``mixed_dtype_fused_layer_norm_affine``, likewise.

    Example::

        >>> input, weight, bias = torch.randn(8, 64).bfloat16(), torch.ones(64), torch.zeros(64)
        >>> norm = normalization.FusedLayerNormAffineMixedDtypesFunction
        >>> output = norm.apply(input, weight, bias, (64,), 1e-5)
    """

    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)
    forward = staticmethod(_forward(mixed_dtype_fused_layer_norm_affine))


class FusedRMSNormFunction:
    """``fused_rms_norm``, likewise.

    Example::

        >>> output = normalization.FusedRMSNormFunction.apply(torch.randn(8, 64), (64,), 1e-5)
    """

    apply = staticmethod(fused_rms_norm)
    forward = staticmethod(_forward(fused_rms_norm))


class FusedRMSNormAffineFunction:
    """``fused_rms_norm_affine``, likewise.

    Example::

        >>> output = normalization.FusedRMSNormAffineFunction.apply(torch.randn(8, 64), torch.ones(64), (64,), 1e-5)
    """

    apply = staticmethod(fused_rms_norm_affine)
    forward = staticmethod(_forward(fused_rms_norm_affine))


class FusedRMSNormAffineMixedDtypesFunction:
    """``mixed_dtype_fused_rms_norm_affine``, likewise.

    Example::

        >>> input, weight = torch.randn(8, 64).bfloat16(), torch.ones(64)
        >>> output = normalization.FusedRMSNormAffineMixedDtypesFunction.apply(input, weight, (64,), 1e-5)
    """

    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)
    forward = staticmethod(_forward(mixed_dtype_fused_rms_norm_affine))
