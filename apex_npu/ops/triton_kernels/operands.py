# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What kernels can be given: they follow pointers for as many elements as the first operand has, unasked."""

from __future__ import annotations

from torch import Tensor

from apex_npu.ops.reference import FLOATS


def are_taken(op: str, **operands: Tensor | None) -> bool:
    """True where the kernels can take ``operands``, which are 1-D and of one length; else there is plain torch.

    Raises:
        ValueError: They differ in length or device, which no kernel could take.
    """
    present = {name: tensor for name, tensor in operands.items() if tensor is not None}
    first, reference = next(iter(present.items()))
    numel, device = reference.numel(), reference.device
    for name, tensor in present.items():
        if tensor.numel() != numel or tensor.device != device:
            raise ValueError(
                f"{op}: {name} has {tensor.numel()} elements on {tensor.device}, but {first} has {numel} on {device}; "
                "the operands are flat buffers of one length on one device. Nothing has been written"
            )
    return all(tensor.dtype in FLOATS and tensor.is_contiguous() for tensor in present.values())
