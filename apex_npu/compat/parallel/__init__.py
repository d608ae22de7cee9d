# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Training on several devices under Apex's names: thin layers over torch.distributed, and LARC."""

from apex_npu.compat.parallel.distributed import DistributedDataParallel, Reducer, flat_dist_call
from apex_npu.compat.parallel.larc import LARC
from apex_npu.compat.parallel.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "flat_dist_call",
]
