# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ascend NPUs, through torch_npu. Importing this module does not import torch_npu; calling its methods does."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, device

from apex_npu.backends.base import Backend

# Undefined, NCHW, ND and NHWC: torch's strides describe the memory. All others (NC1HWC0, FRACTAL_NZ, ...) tile it.
_BASE_FORMATS = frozenset({-1, 0, 1, 2})
_NCHW, _ND = 0, 2


class NpuBackend(Backend):
    """Private formats, and on chips before the 910B saturating arithmetic with a sticky overflow flag."""

    def __init__(self) -> None:
        super().__init__("hccl")

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

    def is_capturing(self) -> bool:
        """Return whether the current stream records a graph instead of running. It never initializes the device."""
        # torch_npu is not imported for this, and most of its releases have no NPUGraph.
        npu: Any = getattr(sys.modules.get("torch_npu"), "npu", None)
        asks = getattr(npu, "is_current_stream_capturing", None)
        return asks is not None and npu.is_initialized() and bool(asks())

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
