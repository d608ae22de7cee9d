# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What both implementations of ``storage.py`` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from apex_npu.backends._torch_private import storage_use_count


class SlotTable(Protocol):
    """Where tensors were when they were fused."""

    def broken(self, tensors: Sequence[Tensor]) -> list[int]:
        """Indices of the tensors whose address, size, stride, dtype or device is no longer what it was."""
        ...


def storage_numel(tensor: Tensor) -> int:
    """Elements in the storage of ``tensor``."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def has_unnamed_aliases(tensors: Sequence[Tensor]) -> bool:
    """True where more than ``tensors`` reference the one storage that they share."""
    storage = tensors[0].untyped_storage()
    # Each tensor holds the storage once, and so does the Python object used here.
    return storage_use_count(storage) > len({id(t) for t in tensors}) + 1
