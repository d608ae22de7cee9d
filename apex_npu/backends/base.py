# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The protocol that each kind of device implements."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, device


class Backend(Protocol):
    """One kind of device. It has no state: every method takes a tensor or a device."""

    # torch's name of the device type: "cpu", "cuda" or "npu".
    device_type: str
    # The torch.distributed backend for collectives.
    comm_backend: str

    def storage_numel(self, tensor: Tensor) -> int:
        """Return the number of elements in the storage of ``tensor``; private formats need more than ``numel()``."""
        ...

    def has_private_format(self, tensor: Tensor) -> bool:
        """Return whether torch's sizes and strides do not describe the memory (Ascend's NZ, 5HD, ...)."""
        ...

    def has_float64(self, device: device) -> bool:
        """Return whether operators on ``device`` take float64. The first call allocates there, without a wait."""
        ...

    def in_base_format(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or if its format is private, a copy that torch's sizes and strides describe."""
        ...

    def saturates(self) -> bool:
        """Return whether arithmetic gives the largest finite value and raises a device flag instead of giving inf."""
        ...

    def clear_overflow_flag(self, device: device) -> None:
        """Clear the device's sticky overflow flag. Call it only if ``saturates()``."""
        ...

    def overflow_flag(self, device: device) -> bool:
        """Return the device's sticky overflow flag, which waits for the device. Call it only if ``saturates()``."""
        ...
