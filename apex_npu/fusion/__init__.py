# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Flat buffers of many tensors: their layout, memory and gradients, and the runs of slots that step together."""

from apex_npu.fusion.encoded_state import MASTER_PARAM, EncodedView, remainders_of
from apex_npu.fusion.flat_buffer import address_range, is_dense, overlapping
from apex_npu.fusion.flat_grads import FlatGrads, check_combinable
from apex_npu.fusion.fused_group import FusedGroup, HasFusedGroups, by_kind, combined, fuse, not_combinable
from apex_npu.fusion.group_buffers import ModelParamBuffer
from apex_npu.fusion.run import Run
from apex_npu.fusion.storage import (
    WriteTable,
    any_grads,
    are_same,
    drop_grads,
    grads_of,
    increment_versions,
    is_slot,
    low_precision_of,
    set_grads,
    swap_data,
    wraps_tensors,
)

__all__ = [
    "MASTER_PARAM",
    "EncodedView",
    "FlatGrads",
    "FusedGroup",
    "HasFusedGroups",
    "ModelParamBuffer",
    "Run",
    "WriteTable",
    "address_range",
    "any_grads",
    "are_same",
    "by_kind",
    "check_combinable",
    "combined",
    "drop_grads",
    "fuse",
    "grads_of",
    "increment_versions",
    "is_dense",
    "is_slot",
    "low_precision_of",
    "not_combinable",
    "overlapping",
    "remainders_of",
    "set_grads",
    "swap_data",
    "wraps_tensors",
]
