# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Flat buffers of many tensors: their layout, memory and gradients, and the runs of slots that step together."""

from apex_npu.fusion.encoded_state import MASTER_PARAM, STORED_KEYS, EncodedView, encode_states, remainders_of
from apex_npu.fusion.flat_buffer import FlatBuffer, address_range, fills_storage, is_dense, overlapping, plan
from apex_npu.fusion.flat_grads import FlatGrads, check_combinable
from apex_npu.fusion.fused_group import (
    FusedGroup,
    HasFusedGroups,
    by_kind,
    combined,
    fuse,
    fuse_combined,
    not_combinable,
    step_in_place,
)
from apex_npu.fusion.group_buffers import ModelParamBuffer, OwnGrad
from apex_npu.fusion.run import Run, row_count
from apex_npu.fusion.storage import (
    WriteTable,
    any_grads,
    are_same,
    change_data_ptr,
    drop_grads,
    grads_of,
    has_values,
    hold_values,
    increment_versions,
    is_slot,
    low_precision_of,
    set_grads,
    storage_view,
    swap_data,
    wraps_tensors,
)

__all__ = [
    "MASTER_PARAM",
    "STORED_KEYS",
    "EncodedView",
    "FlatBuffer",
    "FlatGrads",
    "FusedGroup",
    "HasFusedGroups",
    "ModelParamBuffer",
    "OwnGrad",
    "Run",
    "WriteTable",
    "address_range",
    "any_grads",
    "are_same",
    "by_kind",
    "change_data_ptr",
    "check_combinable",
    "combined",
    "drop_grads",
    "encode_states",
    "fills_storage",
    "fuse",
    "fuse_combined",
    "grads_of",
    "has_values",
    "hold_values",
    "increment_versions",
    "is_dense",
    "is_slot",
    "low_precision_of",
    "not_combinable",
    "overlapping",
    "plan",
    "remainders_of",
    "row_count",
    "set_grads",
    "step_in_place",
    "storage_view",
    "swap_data",
    "wraps_tensors",
]
