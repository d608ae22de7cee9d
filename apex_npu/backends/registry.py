# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which backend answers for a device."""

from __future__ import annotations

import sys

import torch

from apex_npu.backends.base import Backend
from apex_npu.backends.ieee import IeeeBackend
from apex_npu.backends.npu import NpuBackend

_NPU = NpuBackend()
_BACKENDS: dict[str, Backend] = {
    "cpu": IeeeBackend("cpu", "gloo"),
    "cuda": IeeeBackend("cuda", "nccl"),
    "npu": _NPU,
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
    """True while work for a device is recorded instead of run: in the capture of a CUDA graph, or an NPU's."""
    # Asking CUDA would make a context in a process that has none.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    return "torch_npu" in sys.modules and _NPU.is_capturing()
