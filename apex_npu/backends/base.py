# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the package asks about a kind of device, and the answers for all devices without a class of their own."""

from __future__ import annotations

from torch import Tensor, device


class Backend:
    """A kind of device with IEEE arithmetic and plain storages: cpu, cuda, and any accelerator that torch supports.

    Attributes:
        comm_backend: The torch.distributed backend for collectives.
    """

    def __init__(self, comm_backend: str) -> None:
        """Set the backend for collectives."""
        self.comm_backend = comm_backend

    def storage_numel(self, tensor: Tensor) -> int:
        """Return the number of elements in the storage of ``tensor``; private formats need more than ``numel()``."""
        return tensor.untyped_storage().nbytes() // tensor.element_size()

    def has_private_format(self, tensor: Tensor) -> bool:
        """Return whether torch's sizes and strides do not describe the memory (Ascend's NZ, 5HD, ...)."""
        return False

    def has_float64(self, device: device) -> bool:
        """Return whether operators on ``device`` take float64. The first call allocates there, without a wait."""
        return True

    def in_base_format(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or if its format is private, a copy that torch's sizes and strides describe."""
        return tensor

    def saturates(self) -> bool:
        """Return whether arithmetic gives the largest finite value and raises a device flag instead of giving inf."""
        return False

    def clear_overflow_flag(self, device: device) -> None:
        """Clear the device's sticky overflow flag. Call it only if ``saturates()``."""
        raise RuntimeError(f"{device} has no overflow flag")

    def overflow_flag(self, device: device) -> bool:
        """Return the device's sticky overflow flag, which waits for the device. Call it only if ``saturates()``."""
        raise RuntimeError(f"{device} has no overflow flag")
