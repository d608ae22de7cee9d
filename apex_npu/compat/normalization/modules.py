# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The layers: torch's, with Apex's signatures."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from apex_npu.backends.script_warnings import warn
from apex_npu.compat.normalization.functional import (
    Shape,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
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
    """``torch.nn.LayerNorm``, whose state dict it shares.

    Args:
        normalized_shape: The last dimensions, over which is normalized.
        eps: Added to the variance.
        elementwise_affine: With weight and bias.
        memory_efficient: Accepted; torch keeps the input for backward.

    Example::

        >>> norm = normalization.FusedLayerNorm(64)
        >>> norm(torch.randn(8, 64)).shape
        torch.Size([8, 64])
    """


class FusedRMSNorm(_ApexArguments, nn.RMSNorm):
    """``torch.nn.RMSNorm``, whose state dict it shares.

    Args:
        normalized_shape: The last dimensions, over which is normalized.
        eps: Added to the mean square.
        elementwise_affine: With a weight.
        memory_efficient: Accepted; torch keeps the input for backward.

    Example::

        >>> norm = normalization.FusedRMSNorm(64)
        >>> norm(torch.randn(8, 64)).shape
        torch.Size([8, 64])
    """


class _AlwaysAffine(_ApexArguments):
    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **options: Any
    ) -> None:
        cls, affine = type(self).__name__, options.pop("elementwise_affine", None)
        if affine is not None:
            if not affine:
                raise RuntimeError(
                    f"{cls} does not support elementwise_affine=False: its output has the weight's dtype"
                )
            warn(f"{cls} is always elementwise affine; drop the argument elementwise_affine", UserWarning)
        if options:
            raise TypeError(f"{cls} has no argument {', '.join(options)}")
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)


class MixedFusedLayerNorm(_AlwaysAffine, FusedLayerNorm):
    """Layer norm whose output has the dtype of its weight, whatever the input's.

    Args:
        normalized_shape: As in ``FusedLayerNorm``.
        eps: As there.
        memory_efficient: As there.
        **options: ``elementwise_affine``, which must be True.

    Example::

        >>> norm = normalization.MixedFusedLayerNorm(64)
        >>> norm(torch.randn(8, 64).bfloat16()).dtype
        torch.float32
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``."""
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(_AlwaysAffine, FusedRMSNorm):
    """RMS norm whose output has the dtype of its weight, whatever the input's.

    Args:
        normalized_shape: As in ``FusedRMSNorm``.
        eps: As there.
        memory_efficient: As there.
        **options: ``elementwise_affine``, which must be True.

    Example::

        >>> norm = normalization.MixedFusedRMSNorm(64)
        >>> norm(torch.randn(8, 64).bfloat16()).dtype
        torch.float32
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        eps = 1e-5 if self.eps is None else self.eps
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.normalized_shape, eps)
