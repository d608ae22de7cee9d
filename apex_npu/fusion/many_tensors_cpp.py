# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``many_tensors.py`` by the C++ extension (csrc/combine_tensors, csrc/fused_optim): some 50 ns for each tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from apex_npu._C import (
    RoundedCopies,
    WriteTable,
    any_grads,
    are_same,
    drop_grads,
    grads_of,
    has_values,
    hold_grads,
    hold_values,
    increment_versions,
    lost_and_kept,
    low_precision_of,
    set_grads,
    versions_of,
    zero_grads_cpu,
)
from apex_npu.fusion import many_tensors_torch

__all__ = [
    "RoundedCopies",
    "WriteTable",
    "any_grads",
    "are_same",
    "drop_grads",
    "grads_of",
    "has_values",
    "hold_grads",
    "hold_values",
    "increment_versions",
    "lost_and_kept",
    "low_precision_of",
    "set_grads",
    "versions_of",
    "zero_grads",
]


@torch.no_grad()
def zero_grads(tensors: list[Tensor]) -> None:
    """See ``many_tensors_torch``."""
    others = zero_grads_cpu(tensors)
    if others:
        many_tensors_torch.zero_grads([tensors[i] for i in others])
