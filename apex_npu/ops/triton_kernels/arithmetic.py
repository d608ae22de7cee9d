# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Scalars and rounding, for all kernels.

Hyper-parameters are annotated as float64, because Triton would pass Python's floats as float32; ``number`` rounds
them once to the dtype that a kernel computes in. They are arguments, not constants, so that another learning rate needs
no compilation. Offsets are int64, because a buffer may have more than 2³¹ elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def number(x, DTYPE: tl.constexpr):
    """Return a hyper-parameter in the dtype of the computation."""
    return tl.full((), x, DTYPE)


@triton.jit
def divide(a, b):
    """Divide with correct rounding: Triton's float32 division is two ulp off, and gives 0 for the largest divisors."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def root(x):
    """Return the square root, rounded correctly."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def blend(a, b, weight):
    """Return a + weight · (b − a), computed from the nearer end, as torch.lerp does."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


@triton.jit
def block_offsets(BLOCK: tl.constexpr):
    """Return the offsets of this program's elements."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
