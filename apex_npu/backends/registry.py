# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which backend answers for a device."""

from __future__ import annotations

import torch

from apex_npu.backends.base import Backend
from apex_npu.backends.ieee import CudaBackend, IeeeBackend
from apex_npu.backends.npu import NpuBackend

_BACKENDS: dict[str, Backend] = {
    "cpu": IeeeBackend("cpu", "gloo"),
    "cuda": CudaBackend(),
    "npu": NpuBackend(),
    # For planning only: shapes without memory.
    "meta": IeeeBackend("meta", "none"),
}


def for_device(device: torch.device) -> Backend:
    """The backend of ``device``.

    A device type without one of its own (xpu, mps, ...) is taken as IEEE with plain storages, which torch guarantees.
    """
    backend = _BACKENDS.get(device.type)
    if backend is None:
        backend = IeeeBackend(device.type, "gloo")
    return backend


def is_capturing() -> bool:
    """True while what is asked of a device is not done but recorded: in the capture of a CUDA graph, or an NPU's."""
    return any(backend.is_capturing() for backend in _BACKENDS.values())
