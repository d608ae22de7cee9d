# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``exponent_census``: counts the binary exponents of the elements of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

# The columns of a census: those between ``FIRST`` and ``NONFINITE`` are the exponents from -126 on.
ZERO, FIRST, NONFINITE = 0, 1, 255
BIAS = 127
# A gradient is copied to the host in pieces of 64 MiB.
_ELEMENTS = 2**24


def exponent_census(tensors: Sequence[Tensor], factor: float = 1.0) -> Counts:
    """Count the binary exponents of the elements of ``tensors``, times ``factor``, as float32.

    Element x is counted in column ``127 + floor(log2 |x|)``. Subnormal numbers of float32 are counted in column 1,
    zeros in column 0, inf and nan in column 255. The call waits for the device.

    Args:
        tensors: Strided real tensors of any floating dtype.
        factor: A number that the elements are multiplied with.

    Returns:
        The counts, int64, of shape (len(tensors), 256).
    """
    counts: Counts = np.zeros((len(tensors), 256), dtype=np.int64)
    for row, tensor in zip(counts, tensors, strict=True):
        for part in tensor.detach().reshape(-1).split(_ELEMENTS):
            scaled = part.cpu().float() * factor
            columns = (torch.frexp(scaled).exponent + (BIAS - 1)).clamp_(FIRST, NONFINITE - 1)
            columns.masked_fill_(scaled == 0, ZERO).masked_fill_(~scaled.isfinite(), NONFINITE)
            row += torch.bincount(columns, minlength=256).numpy()
    return counts
