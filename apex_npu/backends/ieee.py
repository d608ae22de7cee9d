# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The backend of cpu, cuda, and every other device of torch with IEEE arithmetic and plain storages."""

from __future__ import annotations

from torch import Tensor, device


class IeeeBackend:
    """Plain storages, and overflow gives inf: cpu, cuda, and any accelerator of torch without a special backend."""

    def __init__(self, device_type: str, comm_backend: str) -> None:
        self.device_type = device_type
        self.comm_backend = comm_backend

    def storage_numel(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().nbytes() // tensor.element_size()

    def has_private_format(self, tensor: Tensor) -> bool:
        return False

    def has_float64(self, device: device) -> bool:
        return True

    def in_base_format(self, tensor: Tensor) -> Tensor:
        return tensor

    def saturates(self) -> bool:
        return False

    def clear_overflow_flag(self, device: device) -> None:
        raise RuntimeError(f"{device} has no overflow flag")

    def overflow_flag(self, device: device) -> bool:
        raise RuntimeError(f"{device} has no overflow flag")
