# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the kernels share: scalars and rounding.

Hyper-parameters are annotated as float64, since Triton would take Python's floats as float32; ``number`` rounds them
once to what a kernel computes in. They are arguments, not constants, so that another learning rate compiles nothing.
Offsets are int64 throughout: a buffer may have more than 2³¹ elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def number(x, DTYPE: tl.constexpr):
    """A hyper-parameter in the dtype that is computed in."""
    return tl.full((), x, DTYPE)


@triton.jit
def divide(a, b):
    """The quotient, rounded correctly: Triton's own float32 division is two ulp off, and 0 for the largest divisors."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def root(x):
    """The square root, rounded correctly."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def blend(a, b, weight):
    """As torch.lerp: a + weight · (b − a), computed from the nearer end."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


@triton.jit
def block_offsets(BLOCK: tl.constexpr):
    """Which elements this program has."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
