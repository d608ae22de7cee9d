# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``storage.py`` by the C++ extension (csrc/combine_tensors): storages are re-pointed, and all aliases follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu import _C
from apex_npu._C import (
    allocated_by_torch,
    is_slot,
    round_to_copies,
    storage_view,
    storage_views,
    written_copies,
)
from apex_npu.backends.script_warnings import warn
from apex_npu.fusion.storage_common import SlotTable, has_unnamed_aliases, storage_numel

__all__ = [
    "aliases_follow",
    "allocated_by_torch",
    "change_data_ptr",
    "follows_aliases",
    "is_part_of_storage",
    "is_slot",
    "move_out",
    "move_storages",
    "release_previous",
    "round_to_copies",
    "slot_table",
    "storage_view",
    "storage_views",
    "watch_copies",
    "written_copies",
]


def change_data_ptr(dst: Tensor, src: Tensor, offset: int) -> None:
    """See ``storage_torch``."""
    move_storages([[dst]], src, [offset], copy_values=False)


def move_storages(
    lists: Sequence[Sequence[Tensor]], buffer: Tensor, offsets: Sequence[int], *, copy_values: bool
) -> None:
    """See ``storage_torch``."""
    for i in _C.move_storages(lists, buffer, offsets, copy_values):
        warn(
            f"a numpy array over a tensor of shape {tuple(lists[i][0].shape)} has not followed it into other memory, "
            "and keeps the values of now: make the array again"
        )


@torch.no_grad()
def move_out(tensor: Tensor) -> None:
    """See ``storage_torch``; all aliases follow."""
    copy = tensor.detach().as_strided((storage_numel(tensor),), (1,), 0).clone()
    move_storages([[tensor]], copy, [0], copy_values=False)


def slot_table(tensors: Sequence[Tensor]) -> SlotTable:
    """See ``storage_torch``."""
    return _C.SlotTable(tensors)


def watch_copies(flat: Tensor, offsets: Sequence[int], numels: Sequence[int]) -> bool:
    """See ``storage_torch``."""
    if flat.device.type != "cpu":
        return False
    _C.watch_copies(flat, offsets, numels)
    return True


def follows_aliases() -> bool:
    """See ``storage_torch``."""
    return True


def aliases_follow(tensors: Sequence[Tensor]) -> bool:
    """See ``storage_torch``. ``Tensor.numpy`` fixes the size of a storage, which torch otherwise leaves free."""
    return tensors[0].untyped_storage().resizable() or not has_unnamed_aliases(tensors)


def is_part_of_storage(tensor: Tensor) -> bool:
    """See ``storage_torch``."""
    return False


def release_previous(tensor: Tensor) -> bool:
    """See ``storage_torch``."""
    if not _C.keeps_previous(tensor):
        return True
    if has_unnamed_aliases([tensor]):
        return False
    _C.release_previous(tensor)
    return True
