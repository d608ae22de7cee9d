# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's, under other names."""

from torch.optim import SGD as NpuFusedSGD
from torch.optim import Adam as NpuFusedAdam
from torch.optim import AdamW as NpuFusedAdamW

__all__ = ["NpuFusedAdam", "NpuFusedAdamW", "NpuFusedSGD"]
