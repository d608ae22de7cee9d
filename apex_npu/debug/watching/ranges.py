# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``ranges_of``: reads the smallest and the largest elements of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def ranges_of(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Return the smallest and the largest element of each tensor, or nan for both if it contains nan.

    This launches one kernel for each tensor, and waits once for each device and dtype.
    """
    ranges = [(0.0, 0.0)] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(i)
    for (device, dtype), indices in alike.items():
        ends = torch.empty(len(indices), 2, dtype=dtype.to_real(), device=device)
        for i, pair in zip(indices, ends, strict=True):
            _read_ends(tensors[i], *pair.unbind())
        for i, (smallest, largest) in zip(indices, ends.tolist(), strict=True):
            ranges[i] = smallest, largest
    return ranges


def _read_ends(tensor: Tensor, low: Tensor, high: Tensor) -> None:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor.detach()
    try:
        torch.aminmax(real, out=(low, high))
    except RuntimeError:  # not every CANN release has it
        low.copy_(real.amin())
        high.copy_(real.amax())


def is_finite(ends: tuple[float, float]) -> bool:
    """Return whether the tensor with this range is finite."""
    return all(map(math.isfinite, ends))
