# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Training with several processes: averages of gradients, checks of agreement, and sums over parts of tensors.

This package sends the flat buffers of ``fusion``; ``amp`` and ``optimizers`` use it. Start at ``grad_reducer.py``.
"""

from apex_npu.distributed.grad_reducer import GradReducer, ReduceOptions
from apex_npu.distributed.group_reference import GroupReference
from apex_npu.distributed.matrix_exchange import MatrixExchange, MatrixPart
from apex_npu.distributed.part_sums import PartSums, clip_grad_norm_, total_grad_norm
from apex_npu.distributed.rank_progress import RankProgress

__all__ = [
    "GradReducer",
    "GroupReference",
    "MatrixExchange",
    "MatrixPart",
    "PartSums",
    "RankProgress",
    "ReduceOptions",
    "clip_grad_norm_",
    "total_grad_norm",
]
