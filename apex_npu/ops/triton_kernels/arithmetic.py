# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Scalars and rounding, for all kernels, and the numbers that depend on a step's learning rate and count.

Hyper-parameters are annotated as float64, because Triton would pass Python's floats as float32; ``number`` rounds
them once to the dtype that a kernel computes in. They are arguments, not constants, so that another learning rate needs
no compilation. Offsets are int64, because a buffer may have more than 2³¹ elements.

A captured graph requires that the device computes numbers of a step. One program writes all of them into float64
``numbers``, at the indices below, and a rule's kernel reads them there instead of taking arguments. Computing powers in
every program of the kernel would take longer than its memory traffic.
"""

from __future__ import annotations

import triton
import triton.language as tl

LR = tl.constexpr(0)
STEP_SIZE = tl.constexpr(1)  # lr / (1 − beta1^step)
CORRECTION1 = tl.constexpr(2)  # 1 − beta1^step
ROOT_CORRECTION2 = tl.constexpr(3)  # sqrt(1 − beta2^step)
KEPT = tl.constexpr(4)  # 1 − lr · decay
LATER = tl.constexpr(5)  # 0 in the first step
GO = tl.constexpr(6)  # 0 if gradients have overflowed
COUNT = 7


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


@triton.jit
def step_numbers(
    numbers,
    lr_tensor,
    step_tensor,
    found_inf,
    lr: tl.float64,
    step: tl.float64,
    log_beta1: tl.float64,
    log_beta2: tl.float64,
    decay: tl.float64,
    CORRECTED: tl.constexpr,
):
    """Write all numbers. Without CORRECTED both corrections are 1."""
    rate = number(lr, tl.float64)
    if lr_tensor is not None:
        rate = tl.load(lr_tensor).to(tl.float64)
    count = number(step, tl.float64)
    if step_tensor is not None:
        count = tl.load(step_tensor).to(tl.float64)
    one = number(1.0, tl.float64)
    correction1, correction2 = one, one
    if CORRECTED:
        correction1 = one - tl.exp(count * number(log_beta1, tl.float64))
        correction2 = one - tl.exp(count * number(log_beta2, tl.float64))
    tl.store(numbers + LR, rate)
    tl.store(numbers + STEP_SIZE, rate / correction1)
    tl.store(numbers + CORRECTION1, correction1)
    tl.store(numbers + ROOT_CORRECTION2, tl.sqrt(correction2))
    tl.store(numbers + KEPT, one - rate * number(decay, tl.float64))
    tl.store(numbers + LATER, tl.where(count == 1.0, number(0.0, tl.float64), one))
    go = one
    if found_inf is not None:
        go = tl.where(tl.load(found_inf) == 0, one, number(0.0, tl.float64))
    tl.store(numbers + GO, go)


@triton.jit
def chosen(numbers, WHICH: tl.constexpr, x, DTYPE: tl.constexpr):
    """Return the number at WHICH in the dtype of the computation, or ``x`` if the host knows it."""
    if numbers is not None:
        return tl.load(numbers + WHICH).to(DTYPE)
    else:
        return number(x, DTYPE)


@triton.jit
def unless_overflowed(numbers, mask):
    """Return ``mask``, or an empty mask if gradients have overflowed."""
    if numbers is not None:
        # Not mask & ...: Triton's interpreter cannot combine the result of a float64 comparison.
        return tl.where(tl.load(numbers + GO) != 0, mask, False)
    else:
        return mask
