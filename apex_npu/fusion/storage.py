# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Memory under tensors: re-point a storage, view a buffer through a storage of its own, detect what has moved.

``storage_torch.py`` documents the functions; the extension replaces them where it is loaded.
"""

from __future__ import annotations

from apex_npu._extension import extension
from apex_npu.backends._torch_private import wraps_tensors
from apex_npu.fusion.storage_common import SlotTable, has_unnamed_aliases, storage_numel

if extension is None:
    from apex_npu.fusion.storage_torch import (
        aliases_follow,
        allocated_by_torch,
        change_data_ptr,
        follows_aliases,
        is_part_of_storage,
        is_slot,
        move_out,
        move_storages,
        release_previous,
        round_to_copies,
        slot_table,
        storage_view,
        storage_views,
        watch_copies,
        written_copies,
    )
else:
    from apex_npu.fusion.storage_cpp import (
        aliases_follow,
        allocated_by_torch,
        change_data_ptr,
        follows_aliases,
        is_part_of_storage,
        is_slot,
        move_out,
        move_storages,
        release_previous,
        round_to_copies,
        slot_table,
        storage_view,
        storage_views,
        watch_copies,
        written_copies,
    )

__all__ = [
    "SlotTable",
    "aliases_follow",
    "allocated_by_torch",
    "change_data_ptr",
    "follows_aliases",
    "has_unnamed_aliases",
    "is_part_of_storage",
    "is_slot",
    "move_out",
    "move_storages",
    "release_previous",
    "round_to_copies",
    "slot_table",
    "storage_numel",
    "storage_view",
    "storage_views",
    "watch_copies",
    "wraps_tensors",
    "written_copies",
]
