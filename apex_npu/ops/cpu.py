# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""CPU kernels from the C++ extension (csrc/fused_optim), if it is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from apex_npu._extension import extension

available = extension is not None


def register() -> object:
    """Register the extension's kernels as the CPU kernels of the declared ops; call it only if ``available``.

    The kernels call the reference for operands that they do not take: segments that are not ranges of memory, and
    float64 together with another dtype.

    Returns:
        An object that keeps the kernels registered for as long as it lives.
    """
    from apex_npu._C import KernelsCpu

    return KernelsCpu()


def decode_state(stored: Tensor, scales: Tensor | None, table: Tensor) -> Tensor:
    """Return a state in float32; ``table`` describes its run (see ``dispatch.py``). Call it only if ``available``."""
    values = torch.empty(stored.shape, dtype=torch.float32, device=stored.device)
    extension.decode_state_cpu(stored, scales, table, values)
    return values


def encode_state(values: Tensor, stored: Tensor, scales: Tensor | None, table: Tensor, count: int, index: int) -> None:
    """Write ``values``, which may be overwritten, to the ``index``-th state of a rule in step ``count``.

    Call it only if ``available``.
    """
    extension.encode_state_cpu(values, stored, scales, table, count, index)
