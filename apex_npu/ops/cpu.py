# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""CPU kernels from the C++ extension (csrc/fused_optim), where it is loaded."""

from __future__ import annotations

from torch import Tensor

from apex_npu._extension import extension
from apex_npu.ops import reference_segments

available = extension is not None


def segment_dot(a: Tensor, b: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None) -> Tensor:
    """See ``apex_npu.ops.schemas.segment_dot``; ``ids`` are given where ranges cannot tell what belongs together."""
    if ids is not None:
        return reference_segments.segment_dot(a, b, starts, lengths, ids)
    assert extension is not None
    sums: Tensor = extension.segment_dot_cpu(a, b, starts, lengths)
    return sums


def segment_add_(x: Tensor, y: Tensor, factors: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None) -> None:
    """See ``apex_npu.ops.schemas.segment_add_``; ``ids`` are given where ranges cannot tell what belongs together."""
    if ids is not None:
        reference_segments.segment_add_(x, y, factors, starts, lengths, ids)
        return
    assert extension is not None
    extension.segment_add_cpu(x, y, factors, starts, lengths)
