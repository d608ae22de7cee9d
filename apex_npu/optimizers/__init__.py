# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fused optimizers: torch.optim's rules on flat buffers, with or without amp."""

from apex_npu.optimizers.adam import NpuFusedAdam
from apex_npu.optimizers.adamw import NpuFusedAdamW
from apex_npu.optimizers.base import FusedOptimizer
from apex_npu.optimizers.sgd import NpuFusedSGD

__all__ = ["FusedOptimizer", "NpuFusedAdam", "NpuFusedAdamW", "NpuFusedSGD"]
