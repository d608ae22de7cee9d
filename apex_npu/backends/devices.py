# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the package asks about a kind of device. Only a call about an NPU imports torch_npu."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, device


class Backend:
    """A kind of device with IEEE arithmetic and plain storages: cpu, cuda, and any accelerator that torch supports."""

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


# Undefined, NCHW, ND and NHWC: torch's strides describe the memory. All others (NC1HWC0, FRACTAL_NZ, ...) tile it.
_BASE_FORMATS = frozenset({-1, 0, 1, 2})
_NCHW, _ND = 0, 2


class NpuBackend(Backend):
    """Private formats, and on chips before the 910B saturating arithmetic with a sticky overflow flag."""

    def _torch_npu(self) -> Any:
        import torch_npu

        return torch_npu

    def storage_numel(self, tensor: Tensor) -> int:
        return int(self._torch_npu().get_storage_size(tensor))

    def has_private_format(self, tensor: Tensor) -> bool:
        return self._torch_npu().get_npu_format(tensor) not in _BASE_FORMATS

    def has_float64(self, device: device) -> bool:
        return _keeps_float64(device)

    def in_base_format(self, tensor: Tensor) -> Tensor:
        if not self.has_private_format(tensor):
            return tensor
        based: Tensor = self._torch_npu().npu_format_cast(tensor, _NCHW if tensor.dim() == 4 else _ND)
        return based

    def saturates(self) -> bool:
        return not self._torch_npu().npu.utils.is_support_inf_nan()

    def clear_overflow_flag(self, device: device) -> None:
        with self._torch_npu().npu.device(device):
            self._torch_npu().npu.clear_npu_overflow_flag()

    def overflow_flag(self, device: device) -> bool:
        with self._torch_npu().npu.device(device):
            return bool(self._torch_npu().npu.get_npu_overflow_flag())


@functools.cache
def _keeps_float64(device: device) -> bool:
    """Return whether a tensor stays float64; torch_npu makes it float32 if the device has no float64."""
    return torch.empty(0, dtype=torch.float32, device=device).to(torch.float64).dtype == torch.float64


_BACKENDS: dict[str, Backend] = {"npu": NpuBackend()}
_OTHERS = Backend()


def for_device(device: torch.device) -> Backend:
    """Return the backend of ``device``.

    A device type that is not registered (xpu, mps, ...) is treated as IEEE with plain storages, as torch guarantees.
    """
    return _BACKENDS.get(device.type, _OTHERS)


def is_capturing() -> bool:
    """Return whether work for a device is being recorded instead of run, in the capture of a CUDA graph or an NPU's."""
    # Asking a device would create a context in a process that has none.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    # torch_npu is not imported for this, and most of its releases have no NPUGraph.
    npu: Any = getattr(sys.modules.get("torch_npu"), "npu", None)
    asks = getattr(npu, "is_current_stream_capturing", None)
    return asks is not None and npu.is_initialized() and bool(asks())
