# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Processes that train together: averages of their gradients, what they agree on, parameters cut into parts.

Above ``fusion``, whose flat buffers travel, and below ``amp`` and ``optimizers``. Start at ``grad_reducer.py``.
"""

from apex_npu.distributed.grad_reducer import GradReducer, ReduceOptions
from apex_npu.distributed.group_reference import GroupReference
from apex_npu.distributed.part_sums import PartSums, clip_grad_norm_, total_grad_norm
from apex_npu.distributed.rank_progress import RankProgress
from apex_npu.distributed.shards import (
    Along,
    groups_over,
    is_partial,
    is_sharded,
    local_grad,
    local_part,
    local_part_as,
    mesh_groups,
    meshes_of,
    sharded_like,
)

__all__ = [
    "Along",
    "GradReducer",
    "GroupReference",
    "PartSums",
    "RankProgress",
    "ReduceOptions",
    "clip_grad_norm_",
    "groups_over",
    "is_partial",
    "is_sharded",
    "local_grad",
    "local_part",
    "local_part_as",
    "mesh_groups",
    "meshes_of",
    "sharded_like",
    "total_grad_norm",
]
