# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that depend on a step's learning rate and count, computed on the device, as a captured graph requires.

One program writes all of them into float64 ``numbers``, at the indices below, and a rule's kernel reads them there
instead of taking arguments. Computing powers in every program of the kernel would take longer than its memory traffic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from apex_npu.ops.triton_kernels.arithmetic import number

LR = tl.constexpr(0)
STEP_SIZE = tl.constexpr(1)  # lr / (1 − beta1^step)
CORRECTION1 = tl.constexpr(2)  # 1 − beta1^step
ROOT_CORRECTION2 = tl.constexpr(3)  # sqrt(1 − beta2^step)
KEPT = tl.constexpr(4)  # 1 − lr · decay
LATER = tl.constexpr(5)  # 0 in the first step
GO = tl.constexpr(6)  # 0 if gradients have overflowed
COUNT = 7


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
