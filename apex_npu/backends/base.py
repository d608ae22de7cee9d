# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the layers above require of a kind of device."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, device


class Backend(Protocol):
    """One kind of device. Stateless: every question names its tensor or device."""

    # torch's name of the device: "cpu", "cuda", "npu".
    device_type: str
    # The torch.distributed backend for its collectives.
    comm_backend: str

    def storage_numel(self, tensor: Tensor) -> int:
        """Elements of the physical storage of ``tensor``; private formats make it larger than ``numel()``."""
        ...

    def has_private_format(self, tensor: Tensor) -> bool:
        """True where torch's sizes and strides do not describe the memory (Ascend's NZ, 5HD, ...)."""
        ...

    def has_float64(self, device: device) -> bool:
        """True where operators on ``device`` take float64. The first call allocates there, without a wait."""
        ...

    def in_base_format(self, tensor: Tensor) -> Tensor:
        """``tensor``, or where its format is private a copy that torch's sizes and strides describe."""
        ...

    def saturates(self) -> bool:
        """True where arithmetic clamps to the largest finite value and raises a device flag instead of giving inf."""
        ...

    def clear_overflow_flag(self, device: device) -> None:
        """Lower the device's sticky overflow flag. Only called where ``saturates()``."""
        ...

    def overflow_flag(self, device: device) -> bool:
        """Read the device's sticky overflow flag (a host sync). Only called where ``saturates()``."""
        ...
