# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The backend of each device type."""

from __future__ import annotations

import sys

import torch

from apex_npu.backends.base import Backend
from apex_npu.backends.npu import NpuBackend

_NPU = NpuBackend()
_BACKENDS: dict[str, Backend] = {"cuda": Backend("nccl"), "npu": _NPU}
_OTHERS = Backend("gloo")


def for_device(device: torch.device) -> Backend:
    """Return the backend of ``device``.

    A device type that is not registered (xpu, mps, ...) is treated as IEEE with plain storages, as torch guarantees.
    """
    return _BACKENDS.get(device.type, _OTHERS)


def is_capturing() -> bool:
    """Return whether work for a device is being recorded instead of run, in the capture of a CUDA graph or an NPU's."""
    # Asking CUDA would create a context in a process that has none.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    return "torch_npu" in sys.modules and _NPU.is_capturing()
