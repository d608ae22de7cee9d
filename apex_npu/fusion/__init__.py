# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Flat buffers that many tensors lie in: layout (integers), memory, gradients, and what steps together."""

from apex_npu.fusion.flat_buffer import FlatBuffer, Plan, owns_storage, plan
from apex_npu.fusion.flat_grads import FlatGrads
from apex_npu.fusion.fused_group import FusedGroup, HasFusedGroups, Twin
from apex_npu.fusion.fusing import fuse, step_in_place
from apex_npu.fusion.grad_clip import clip_coefficient, clip_grad_norm_, total_grad_norm
from apex_npu.fusion.grad_reducer import GradReducer, ReduceOptions
from apex_npu.fusion.layout import extent_numel, overlapping
from apex_npu.fusion.many_tensors import (
    are_same,
    drop_grads,
    grads_of,
    hold_values,
    increment_versions,
    low_precision_of,
    versions_of,
    zero_grads,
)
from apex_npu.fusion.rank_progress import RankProgress
from apex_npu.fusion.run import Run, row_count
from apex_npu.fusion.shards import is_partial, is_sharded, local_grad, local_part, local_part_as, sharded_like
from apex_npu.fusion.storage import change_data_ptr, is_slot, storage_view, wraps_tensors

__all__ = [
    "FlatBuffer",
    "FlatGrads",
    "FusedGroup",
    "GradReducer",
    "HasFusedGroups",
    "Plan",
    "RankProgress",
    "ReduceOptions",
    "Run",
    "Twin",
    "are_same",
    "change_data_ptr",
    "clip_coefficient",
    "clip_grad_norm_",
    "drop_grads",
    "extent_numel",
    "fuse",
    "grads_of",
    "hold_values",
    "increment_versions",
    "is_partial",
    "is_sharded",
    "is_slot",
    "local_grad",
    "local_part",
    "local_part_as",
    "low_precision_of",
    "overlapping",
    "owns_storage",
    "plan",
    "row_count",
    "sharded_like",
    "step_in_place",
    "storage_view",
    "total_grad_norm",
    "versions_of",
    "wraps_tensors",
    "zero_grads",
]
