# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Re-points storages, makes views of a buffer with separate storages, and reads or writes thousands of tensors at once.

The C++ extension (csrc/combine_tensors) re-points storages, so that all aliases follow, and takes 50 ns per tensor.
``unfused.py`` documents the functions, and replaces them without the extension: then no tensor moves, views share the
buffer's storage, and ``is_slot`` is always false.
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
        WriteTable,
        any_grads,
        are_same,
        drop_grads,
        grads_of,
        has_values,
        hold_values,
        increment_versions,
        is_slot,
        low_precision_of,
        set_grads,
        storage_view,
        storage_views,
        swap_data,
    )
else:
    from apex_npu._C import (  # type: ignore[assignment]
        SlotTable,
        WriteTable,
        any_grads,
        are_same,
        drop_grads,
        grads_of,
        has_values,
        hold_values,
        increment_versions,
        is_slot,
        low_precision_of,
        set_grads,
        storage_view,
        storage_views,
        swap_data,
    )

__all__ = [
    "SlotTable",
    "WriteTable",
    "aliases_follow",
    "any_grads",
    "are_same",
    "change_data_ptr",
    "drop_grads",
    "grads_of",
    "has_unnamed_aliases",
    "has_values",
    "hold_values",
    "increment_versions",
    "is_slot",
    "low_precision_of",
    "move_out",
    "move_storages",
    "release_previous",
    "set_grads",
    "storage_numel",
    "storage_view",
    "storage_views",
    "swap_data",
    "wraps_tensors",
]


def storage_numel(tensor: Tensor) -> int:
    """Return the number of elements in the storage of ``tensor``."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def has_unnamed_aliases(tensors: Sequence[Tensor]) -> bool:
    """Return True if the one storage of ``tensors`` has references other than ``tensors``."""
    storage = tensors[0].untyped_storage()
    # Each tensor holds the storage once, and so does the Python object used here.
    return storage_use_count(storage) > len({id(t) for t in tensors}) + 1


def change_data_ptr(dst: Tensor, src: Tensor, offset: int) -> None:
    """Make the storage of ``dst`` begin ``offset`` elements after the first element of ``src``.

    ``dst`` and all aliases of it then use ``src``'s memory. Values are not copied; sizes, strides and the identity of a
    Parameter stay. The memory is owned jointly and outlives ``src``. A view of ``dst``'s memory from outside torch (a
    numpy array) keeps the old memory, which stays allocated.

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
    """Do ``change_data_ptr`` for many storages.

    Args:
        lists: For each storage, tensors that share it; their other aliases follow.
        buffer: The tensor to whose memory the storages move.
        offsets: The offset of each storage in ``buffer``, in elements.
        copy_values: Copy the elements of the storages, too.

    Raises:
        TypeError, ValueError, RuntimeError: ``change_data_ptr`` raises it; nothing has moved then.
    """
    for i in require_extension("moving tensors into a buffer").move_storages(lists, buffer, offsets, copy_values):
        warn(
            f"a tensor of shape {tuple(lists[i][0].shape)} has moved to other memory, and a numpy array over it keeps "
            "the old memory and values: make the array again"
        )


@torch.no_grad()
def move_out(tensor: Tensor) -> None:
    """Move the storage of ``tensor``, a slot of a buffer, out of that buffer, with its values and all aliases."""
    copy = tensor.detach().as_strided((storage_numel(tensor),), (1,), 0).clone()
    move_storages([[tensor]], copy, [0], copy_values=False)


def aliases_follow(tensors: Sequence[Tensor]) -> bool:
    """Return True if all references to the one storage of ``tensors`` follow when it moves.

    This requires memory of torch's allocator. ``Tensor.numpy`` makes a storage non-resizable; its other references may
    then be numpy arrays, which do not follow.
    """
    if extension is None or not extension.allocated_by_torch(tensors[0]):
        return False
    return tensors[0].untyped_storage().resizable() or not has_unnamed_aliases(tensors)


def release_previous(tensor: Tensor) -> bool:
    """Release the former memory of a moved tensor, unless references from outside torch may still exist.

    Returns:
        True if no former memory is kept.
    """
    if extension is None or not extension.keeps_previous(tensor):
        return True
    if has_unnamed_aliases([tensor]):
        return False
    extension.release_previous(tensor)
    return True
