# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The memory under tensors: re-point a storage, view a buffer through a separate storage, detect moved tensors.

The C++ extension (csrc/combine_tensors) re-points storages, so that all aliases follow. Without it nothing moves:
views share the buffer's storage, and no tensor is a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu._extension import extension, require_extension
from apex_npu.backends._torch_private import storage_use_count, wraps_tensors
from apex_npu.backends.script_warnings import warn

if extension is None:
    from apex_npu.fusion.unfused import (
        SlotTable,
        is_slot,
        storage_view,
        storage_views,
    )
else:
    from apex_npu._C import (  # type: ignore[assignment]
        SlotTable,
        is_slot,
        storage_view,
        storage_views,
    )

__all__ = [
    "SlotTable",
    "aliases_follow",
    "change_data_ptr",
    "has_unnamed_aliases",
    "is_slot",
    "move_out",
    "move_storages",
    "release_previous",
    "storage_numel",
    "storage_view",
    "storage_views",
    "wraps_tensors",
]


def storage_numel(tensor: Tensor) -> int:
    """Return the number of elements in the storage of ``tensor``."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def has_unnamed_aliases(tensors: Sequence[Tensor]) -> bool:
    """True if anything but ``tensors`` references the one storage that they share."""
    storage = tensors[0].untyped_storage()
    # Each tensor holds the storage once, and so does the Python object used here.
    return storage_use_count(storage) > len({id(t) for t in tensors}) + 1


def change_data_ptr(dst: Tensor, src: Tensor, offset: int) -> None:
    """Make the storage of ``dst`` begin ``offset`` elements after the first element of ``src``.

    ``dst`` and every alias of it see ``src``'s memory from then on. Values are not copied; sizes, strides and the
    identity of a Parameter stay. The memory is owned jointly and outlives ``src``. A view of ``dst``'s memory from
    outside torch (a numpy array) keeps the old memory, which stays allocated.

    Args:
        dst: Any dense tensor; its whole storage moves.
        src: The buffer, of the same dtype and device.
        offset: The number of elements from the beginning of ``src``.

    Raises:
        TypeError: The dtypes differ, or a tensor is sparse, quantised, lazily conjugated or of a subclass.
        ValueError: The devices differ, the range is outside ``src``, both are views of one storage, or ``src`` does not
            own its memory.
        RuntimeError: The C++ extension is not in use.
    """
    move_storages([[dst]], src, [offset], copy_values=False)


def move_storages(
    lists: Sequence[Sequence[Tensor]], buffer: Tensor, offsets: Sequence[int], *, copy_values: bool
) -> None:
    """Do ``change_data_ptr`` for many storages, each of which the tensors of one of ``lists`` share.

    Args:
        lists: The tensors of each storage; their other aliases follow, too.
        buffer: The tensor to whose memory the storages move.
        offsets: The offset of each storage in ``buffer``, in elements.
        copy_values: Copy the elements of the storages, too.

    Raises:
        TypeError, ValueError, RuntimeError: See ``change_data_ptr``; nothing has moved then.
    """
    for i in require_extension("moving tensors into a buffer").move_storages(lists, buffer, offsets, copy_values):
        warn(
            f"a numpy array over a tensor of shape {tuple(lists[i][0].shape)} has not followed it into other memory, "
            "and keeps the values of now: make the array again"
        )


@torch.no_grad()
def move_out(tensor: Tensor) -> None:
    """Move the storage of ``tensor``, a slot of a buffer, out of that buffer, with its values and all aliases."""
    copy = tensor.detach().as_strided((storage_numel(tensor),), (1,), 0).clone()
    move_storages([[tensor]], copy, [0], copy_values=False)


def aliases_follow(tensors: Sequence[Tensor]) -> bool:
    """True if all references to the one storage of ``tensors`` follow when it moves.

    This is so only for memory of torch's allocator. A storage that ``Tensor.numpy`` has seen has a fixed size; all
    others are resizable.
    """
    if extension is None or not extension.allocated_by_torch(tensors[0]):
        return False
    return tensors[0].untyped_storage().resizable() or not has_unnamed_aliases(tensors)


def release_previous(tensor: Tensor) -> bool:
    """Release memory that was kept because something outside torch might still reference it.

    Returns:
        True if nothing is kept any more.
    """
    if extension is None or not extension.keeps_previous(tensor):
        return True
    if has_unnamed_aliases([tensor]):
        return False
    extension.release_previous(tensor)
    return True
