# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``apex_C``: several tensors as one, and back. Apex has both functions in C++; they are torch's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of ``tensors``, copied into one tensor of one dimension."""
    flat: Tensor = _flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat`` with the shapes of ``tensors``, one after the other."""
    return list(_unflatten_dense_tensors(flat, tensors))
