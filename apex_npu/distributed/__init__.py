# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Processes that train together: averages of their gradients, and what they agree on.

Above ``fusion``, whose flat buffers travel, and below ``amp`` and ``optimizers``. Start at ``grad_reducer.py``.
"""

from apex_npu.distributed.grad_reducer import GradReducer, ReduceOptions
from apex_npu.distributed.group_reference import GroupReference
from apex_npu.distributed.rank_progress import RankProgress

__all__ = [
    "GradReducer",
    "GroupReference",
    "RankProgress",
    "ReduceOptions",
]
