# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``apex_C``: flatten several tensors into one, and back. Apex has these functions in C++; here they are torch's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of the elements of ``tensors`` in one 1-D tensor."""
    flat: Tensor = _flatten_dense_tensors(tensors)
    return flat.clone() if len(tensors) == 1 else flat  # which torch returns as a view


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of ``flat`` with the shapes of ``tensors``."""
    return list(_unflatten_dense_tensors(flat, tensors))
