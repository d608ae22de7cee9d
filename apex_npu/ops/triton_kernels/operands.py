# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks operands: kernels read and write as many elements as the first operand has, without a check of their own."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from apex_npu.ops.reference import FLOATS

# The dtypes of operands, if some are encoded.
STORED = FLOATS | {torch.int8, torch.uint8, torch.int16}


def check_operands(op: str, dtypes: Set[torch.dtype] = FLOATS, **operands: Tensor | None) -> None:
    """Check that a kernel does not read or write past the end of an operand, or misread it.

    Raises:
        ValueError: Operands differ in length or device, are not contiguous, or have a dtype that is not in ``dtypes``.
    """
    first, like = next((name, tensor) for name, tensor in operands.items() if tensor is not None)
    numel, device = like.numel(), like.device
    for name, tensor in operands.items():
        if tensor is None:
            continue
        if tensor.numel() != numel or tensor.device != device:
            problem = f"has {tensor.numel()} elements on {tensor.device}, but {first} has {numel} on {device}"
        elif not tensor.is_contiguous():
            problem = f"has stride {tensor.stride()}: call contiguous() on it"
        elif tensor.dtype not in dtypes:
            problem = f"has dtype {tensor.dtype}, which is not one of {', '.join(sorted(map(str, dtypes)))}"
        else:
            continue
        raise ValueError(
            f"{op}: {name} {problem}. Operands are contiguous flat buffers of one length on one device. "
            "Nothing has been written"
        )
