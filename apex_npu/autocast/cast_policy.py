# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``CastPolicy``: the tensors and functions that are cast, and their dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class CastPolicy:
    """The casts of a level. ``None`` in a tri-state field means that it does not apply.

    Attributes:
        enabled: False: nothing is cast.
        cast_model_type: O0, O2, O3: the dtype of the model's floating-point parameters and of its forward's inputs.
            False or None: no cast.
        patch_torch_functions: O1: run under torch.autocast, completed by ``autocast_ops.py`` and ``monkey_patches.py``.
        keep_batchnorm_fp32: Keep affine BatchNorms in float32 in a model that is cast.
        user_cast_preferred: Do not apply the lists to functions with registered casts.
        allow_banned: O1: cast half arguments to float32 for functions that are not safe with them, instead of an error.
        cast_model_outputs: The dtype of the forward's outputs; None: they are not cast.
        autocast_dtype: The low-precision dtype of ``patch_torch_functions``.
    """

    enabled: bool = True
    cast_model_type: torch.dtype | Literal[False] | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    user_cast_preferred: bool | None = None
    allow_banned: bool = False
    cast_model_outputs: torch.dtype | None = None
    autocast_dtype: torch.dtype = torch.float16

    @property
    def model_dtype(self) -> torch.dtype | None:
        """The dtype to which the model is cast, or None if it keeps its own."""
        return self.cast_model_type or None

    @property
    def title(self) -> str:
        """The name of the policy in warnings."""
        return "a level of its own"
