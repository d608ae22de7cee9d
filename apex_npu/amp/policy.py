# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What an opt_level means: a frozen ``Policy``, the table of levels, and ``resolve(level, **overrides)``.

No model, no optimizer, no device is touched here: a policy is decided completely, or refused, before anything moves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

LossScale = float | Literal["dynamic"]


@dataclass(frozen=True)
class Policy:
    """One row of decisions. ``None`` in a tri-state field means "does not apply at this level"."""

    opt_level: str
    # What the banner prints after "Selected optimization level".
    brief: str
    enabled: bool = True
    # O0, O2, O3: the dtype of the model's floating parameters and of its forward's inputs; False or None: no cast.
    cast_model_type: torch.dtype | Literal[False] | None = None
    # O1: run under torch.autocast plus the overlay of casting.py.
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: LossScale = 1.0
    combine_grad: bool | None = None
    combine_ddp: bool | None = None
    ddp_replica_count: int = 4
    user_cast_preferred: bool | None = None
    check_combined_tensors: bool | Literal["error"] | None = None
    cast_model_outputs: torch.dtype | None = None
    # The low-precision dtype that patch_torch_functions casts to.
    autocast_dtype: torch.dtype = torch.float16

    @property
    def model_dtype(self) -> torch.dtype | None:
        """The dtype the model is cast to, or None where it keeps its own."""
        return self.cast_model_type or None


OPT_LEVELS = {
    "O0": Policy(
        "O0", "O0:  Pure FP32 training.", cast_model_type=torch.float32, master_weights=False, loss_scale=1.0
    ),
    "O1": Policy(
        "O1", "O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
        patch_torch_functions=True, loss_scale="dynamic",
    ),
    "O2": Policy(
        "O2", "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
        cast_model_type=torch.float16, keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic",
    ),
    "O3": Policy(
        "O3", "O3:  Pure FP16 training.",
        cast_model_type=torch.float16, keep_batchnorm_fp32=False, master_weights=False, loss_scale=1.0,
    ),
}  # fmt: skip
