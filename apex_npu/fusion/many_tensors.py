# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Functions that a step calls for thousands of tensors, each by one call into the C++ extension (50 ns per tensor).

``unfused.py`` documents the functions, and implements them for use without the extension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.fusion import unfused

if extension is None:
    from apex_npu.fusion.unfused import (
        WriteTable,
        any_grads,
        are_same,
        drop_grads,
        grads_of,
        has_values,
        hold_grads,
        hold_values,
        increment_versions,
        low_precision_of,
        set_grads,
        swap_data,
        versions_of,
    )
else:
    from apex_npu._C import (  # type: ignore[assignment]
        WriteTable,
        any_grads,
        are_same,
        drop_grads,
        grads_of,
        has_values,
        hold_grads,
        hold_values,
        increment_versions,
        low_precision_of,
        set_grads,
        swap_data,
        versions_of,
    )

__all__ = [
    "WriteTable",
    "any_grads",
    "are_same",
    "drop_grads",
    "grads_of",
    "has_values",
    "hold_grads",
    "hold_values",
    "increment_versions",
    "low_precision_of",
    "set_grads",
    "swap_data",
    "versions_of",
    "zero_grads",
]


@torch.no_grad()
def zero_grads(tensors: list[Tensor]) -> None:
    """Call ``tensor.grad.zero_()`` for each tensor that has a gradient."""
    others = range(len(tensors)) if extension is None else extension.zero_grads_cpu(tensors)
    if others:
        unfused.zero_grads([tensors[i] for i in others])
