# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The functions behind the layers. ``memory_efficient`` is accepted everywhere and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = int | Sequence[int]


def _shape(normalized_shape: Shape) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """(x − E[x]) / √(Var[x] + eps) over the last dimensions."""
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
    """Layer norm in the dtype of ``weight``, computed in the wider one of input's and weight's."""
    wide = torch.promote_types(input.dtype, weight.dtype)
    return F.layer_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), bias.to(wide), eps).to(weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """X / √(E[x²] + eps) over the last dimensions."""
    return F.rms_norm(input, _shape(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm times ``weight``."""
    return F.rms_norm(input, _shape(normalized_shape), weight, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm in the dtype of ``weight``, computed in the wider one of input's and weight's."""
    wide = torch.promote_types(input.dtype, weight.dtype)
    return F.rms_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), eps).to(weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm, times ``weight`` where there is one; in the dtype of ``weight``."""
    if weight is None:
        return fused_rms_norm(input, normalized_shape, eps)
    return mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps)
