# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""CPU kernels from the C++ extension (csrc/fused_optim), where it is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from apex_npu._extension import extension

available = extension is not None


def register() -> object:
    """Make the extension's kernels those of the ops on the CPU, which have been declared; only where ``available``.

    They hand over to the reference what they do not take: segments that are no ranges of memory, and float64 beside
    another dtype.

    Returns:
        What holds them: they are gone when it is.
    """
    from apex_npu._C import KernelsCpu

    return KernelsCpu()


def decode_state(stored: Tensor, scales: Tensor | None, table: Tensor) -> Tensor:
    """A state, with the ``table`` of its run (see ``dispatch.py``), in float32; only where ``available``."""
    values = torch.empty(stored.shape, dtype=torch.float32, device=stored.device)
    extension.decode_state_cpu(stored, scales, table, values)
    return values


def encode_state(values: Tensor, stored: Tensor, scales: Tensor | None, table: Tensor, count: int, index: int) -> None:
    """Write ``values``, which may be overwritten, to the ``index``-th state of a rule in step ``count``; likewise."""
    extension.encode_state_cpu(values, stored, scales, table, count, index)
