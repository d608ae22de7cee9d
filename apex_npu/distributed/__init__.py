# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Processes that train together: averages of gradients, checks of their agreement, norms over parts of tensors.

An exchange brings the parts of matrices together. This package uses ``fusion``, whose flat buffers
it sends; ``amp`` and ``optimizers`` use it. Start at ``grad_reducer.py``.
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
