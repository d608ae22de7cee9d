# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Processes that train together: averages of their gradients, what they agree on, parameters cut into parts.

Above ``fusion``, whose flat buffers travel, and below ``amp`` and ``optimizers``. Start at ``grad_reducer.py``.
"""

from apex_npu.distributed.grad_reducer import GradReducer, ReduceOptions
from apex_npu.distributed.group_reference import GroupReference
from apex_npu.distributed.rank_progress import RankProgress
from apex_npu.distributed.shard_grads import ShardGrads, memory_of_parts
from apex_npu.distributed.shards import is_partial, is_sharded, local_part, local_part_as, sharded_like

__all__ = [
    "GradReducer",
    "GroupReference",
    "RankProgress",
    "ReduceOptions",
    "ShardGrads",
    "is_partial",
    "is_sharded",
    "local_part",
    "local_part_as",
    "memory_of_parts",
    "sharded_like",
]
