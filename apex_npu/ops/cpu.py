# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""CPU kernels from the C++ extension (csrc/fused_optim), where it is loaded."""

from __future__ import annotations

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
