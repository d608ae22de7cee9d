# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Normalization under Apex's names: torch's, which is fused. ``memory_efficient`` has no effect."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "FusedLayerNorm", "FusedLayerNormAffineFunction", "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction", "FusedRMSNorm", "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction", "FusedRMSNormFunction", "MixedFusedLayerNorm", "MixedFusedRMSNorm",
    "fused_layer_norm", "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine", "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine",
]  # fmt: skip

Shape = int | Sequence[int]


def _shape(normalized_shape: Shape) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer norm without weight and bias."""
    return F.layer_norm(input, _shape(normalized_shape), None, None, eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | Shape,
    bias: Tensor,
    normalized_shape: Shape | Tensor,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm in the dtype of ``input``; 2020's order ``(input, normalized_shape, weight, bias)`` also works."""
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
    """Layer norm in the dtype of ``weight``, computed in the wider dtype of input and weight."""
    wide = torch.promote_types(input.dtype, weight.dtype)
    return F.layer_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), bias.to(wide), eps).to(weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """RMS norm without a weight."""
    return F.rms_norm(input, _shape(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm times ``weight``."""
    return F.rms_norm(input, _shape(normalized_shape), weight, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm in the dtype of ``weight``, computed in the wider dtype of input and weight."""
    wide = torch.promote_types(input.dtype, weight.dtype)
    return F.rms_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), eps).to(weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm times ``weight``, if given, in the dtype of ``weight``; without it at least in float32."""
    if weight is None:
        return fused_rms_norm(input.to(torch.promote_types(input.dtype, torch.float32)), normalized_shape, eps)
    return mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps)


def _autograd_function(name: str, function: Callable[..., Tensor]) -> Any:
    """Return ``function`` as a class like the autograd function of Apex: with ``name.apply`` and ``name.forward``.

    Megatron-LM looks for ``memory_efficient`` among the arguments of ``forward`` (``inspect.getfullargspec``).
    """

    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function)
    vars(forward)["__signature__"] = signature.replace(parameters=[context, *signature.parameters.values()])
    members = {"apply": staticmethod(function), "forward": staticmethod(forward)}
    return type(name, (), {**members, "__doc__": function.__doc__, "__module__": __name__})


FusedLayerNormFunction = _autograd_function("FusedLayerNormFunction", fused_layer_norm)
FusedLayerNormAffineFunction = _autograd_function("FusedLayerNormAffineFunction", fused_layer_norm_affine)
FusedLayerNormAffineMixedDtypesFunction = _autograd_function(
    "FusedLayerNormAffineMixedDtypesFunction", mixed_dtype_fused_layer_norm_affine
)
FusedRMSNormFunction = _autograd_function("FusedRMSNormFunction", fused_rms_norm)
FusedRMSNormAffineFunction = _autograd_function("FusedRMSNormAffineFunction", fused_rms_norm_affine)
FusedRMSNormAffineMixedDtypesFunction = _autograd_function(
    "FusedRMSNormAffineMixedDtypesFunction", mixed_dtype_fused_rms_norm_affine
)


class _ApexArguments(nn.Module):
    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedLayerNorm(_ApexArguments, nn.LayerNorm):
    """``torch.nn.LayerNorm``, whose state dict it shares."""


class FusedRMSNorm(_ApexArguments, nn.RMSNorm):
    """``torch.nn.RMSNorm``, whose state dict it shares."""


class _AlwaysAffine(_ApexArguments):
    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        if not elementwise_affine:
            cls = type(self).__name__
            raise RuntimeError(f"{cls} does not support elementwise_affine=False: its output has the weight's dtype")
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)


class MixedFusedLayerNorm(_AlwaysAffine, FusedLayerNorm):
    """``FusedLayerNorm`` whose output has the dtype of its weight, whatever the input's dtype; always affine."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``."""
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(_AlwaysAffine, FusedRMSNorm):
    """``FusedRMSNorm`` whose output has the dtype of its weight, whatever the input's dtype; always affine."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        eps = 1e-5 if self.eps is None else self.eps
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.normalized_shape, eps)
