# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names that scripts import from apex.contrib.combine_tensors: thin functions over ``apex_npu.fusion``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.backends import for_device
from apex_npu.fusion import wraps_tensors
from apex_npu.fusion.flat_buffer import FlatBuffer, extent_numel, fills_storage, padded_numel, plan
from apex_npu.fusion.storage import change_data_ptr, storage_view

__all__ = [
    "change_data_ptr", "combine_npu", "get_aligned_storage_size", "get_part_combined_tensor", "is_combined_tensor_valid"
]  # fmt: skip


def get_aligned_storage_size(tensor: Tensor) -> int:
    """Return the elements that ``tensor`` occupies in a combined tensor: ``ceil(n / 16) * 16 + 32``, n in its storage.

    Raises:
        RuntimeError: ``tensor`` does not have a floating-point dtype.
    """
    if not tensor.is_floating_point():
        raise RuntimeError(f"only floating-point tensors can be combined, got {tensor.dtype}")
    return padded_numel(for_device(tensor.device).storage_numel(tensor))


def combine_npu(list_of_tensor: Sequence[Tensor], require_copy_value: bool = True) -> Tensor | None:
    """Move tensors into one new flat tensor. Each keeps its identity, shape and aliases, and shares the memory.

    Args:
        list_of_tensor: Dense tensors of one dtype and device. Tensors that share a storage share a slot. A tensor
            listed twice counts once.
        require_copy_value: If False, the values are replaced by zeros.

    Returns:
        The 1-D flat tensor, whose slots are padded with zeros, or None for an empty list.

    Raises:
        TypeError: An item is not a tensor, is sparse or a tensor subclass, or dtypes differ. Nothing has been moved.
        ValueError: Devices differ, or an item is a small view of a larger storage, which has another owner.
        torch.OutOfMemoryError: The buffer does not fit.
    """
    tensors = list(list_of_tensor)
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise TypeError(f"list_of_tensor[{i}] must be a tensor, got {type(t).__name__}")
        if t.layout != torch.strided:
            raise TypeError(f"list_of_tensor[{i}] must be dense, got layout {t.layout}")
        if wraps_tensors(t):
            raise TypeError(
                f"list_of_tensor[{i}] must be a plain tensor with memory of its own, got {type(t.data).__name__}; "
                "pass its local tensor"
            )
    if not tensors:
        return None
    planned = plan(tensors)
    for slot in range(len(planned.layout.slots)):
        sharing = [t for t, s in zip(tensors, planned.layout.slot_of, strict=True) if s == slot]
        if not fills_storage(sharing):
            raise ValueError(
                f"list_of_tensor[{planned.layout.slot_of.index(slot)}] of shape {tuple(sharing[0].shape)} is a view of "
                f"a storage of {planned.layout.slots[slot].numel} elements, a buffer of another owner; combine all its "
                "parts together, or pass a clone()"
            )
    buffer = FlatBuffer(planned.layout.total_numel, planned.dtype, planned.device)
    buffer.adopt(tensors, planned.layout, copy_values=require_copy_value)
    return buffer.flat


def get_part_combined_tensor(combined_tensor: Tensor | None, index: int, size: int) -> Tensor | None:
    """Return elements [index, index + size) of a combined tensor, as a view; None for no tensor or for size 0.

    Raises:
        ValueError: The range is not inside the tensor.
    """
    if combined_tensor is None or size == 0:
        return None
    if index < 0 or size < 0 or index + size > combined_tensor.numel():
        raise ValueError(
            f"elements [{index}, {index + size}) are outside the combined tensor, which has {combined_tensor.numel()}"
        )
    return storage_view(combined_tensor, index, (size,), (1,))


def is_combined_tensor_valid(combined_tensor: Tensor | None, list_of_tensor: Sequence[Tensor | None]) -> bool:
    """Return True if every tensor of the list is wholly inside ``combined_tensor`` and has its dtype and device.

    An empty list is valid; a list with None in it, or with no combined tensor, is not.
    """
    if not list_of_tensor:
        return True
    if combined_tensor is None:
        return False
    begin = combined_tensor.data_ptr()
    end = begin + combined_tensor.numel() * combined_tensor.element_size()
    for t in list_of_tensor:
        if t is None or t.dtype != combined_tensor.dtype or t.device != combined_tensor.device:
            return False
        reach = extent_numel(t.size(), t.stride()) * t.element_size()
        if not begin <= t.data_ptr() <= end - reach:
            return False
    return True
