# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Elementwise update rules: one launch, every operand read and written once.

All alike: gradients and parameters are widened to the states' dtype, the rule of ``apex_npu.ops.elementwise``
follows, and what has changed is rounded and stored. Options are constants, for each of which Triton compiles a kernel
of its own; so are operands that are not there (None).
"""

from __future__ import annotations

import triton
import triton.language as tl

from apex_npu.ops.triton_kernels.arithmetic import blend, block_offsets, divide, load_decayed, number, root, store_param
from apex_npu.ops.triton_kernels.numbers import KEPT, LATER, LR, ROOT_CORRECTION2, STEP_SIZE, chosen, unless_overflowed


@triton.jit
def sgd(
    param,
    grad,
    momentum_buffer,
    model_param,
    grad_scale,
    numbers,
    numel: tl.int64,
    lr: tl.float64,
    momentum: tl.float64,
    share: tl.float64,
    weight_decay: tl.float64,
    L2: tl.constexpr,
    DECOUPLED: tl.constexpr,
    NESTEROV: tl.constexpr,
    FIRST: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``share``: 1 − dampening. FIRST is not known where there are ``numbers``."""
    offsets = block_offsets(BLOCK)
    mask = unless_overflowed(numbers, offsets < numel)
    decay = chosen(numbers, KEPT, weight_decay, DTYPE) if DECOUPLED else number(weight_decay, DTYPE)
    p, update = load_decayed(param, grad, grad_scale, offsets, mask, decay, L2, DECOUPLED, MAXIMIZE, DTYPE)
    if momentum_buffer is not None:
        if FIRST:
            b = update
        else:
            b = tl.load(momentum_buffer + offsets, mask=mask, other=0.0)
            b = number(momentum, DTYPE) * b + number(share, DTYPE) * update
            if numbers is not None:
                b = tl.where(tl.load(numbers + LATER) != 0, b, update)
        tl.store(momentum_buffer + offsets, b, mask=mask)
        update = number(share, DTYPE) * update + number(momentum, DTYPE) * b if NESTEROV else b
    store_param(param, model_param, offsets, p - chosen(numbers, LR, lr, DTYPE) * update, mask)


@triton.jit
def adam(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    model_param,
    grad_scale,
    numbers,
    numel: tl.int64,
    step_size: tl.float64,
    share1: tl.float64,
    beta2: tl.float64,
    share2: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
    root_correction2: tl.float64,
    L2: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``share``: 1 − beta. ``step_size``: lr / (1 − beta1^step)."""
    offsets = block_offsets(BLOCK)
    mask = unless_overflowed(numbers, offsets < numel)
    decay = chosen(numbers, KEPT, weight_decay, DTYPE) if DECOUPLED else number(weight_decay, DTYPE)
    p, g = load_decayed(param, grad, grad_scale, offsets, mask, decay, L2, DECOUPLED, MAXIMIZE, DTYPE)
    m = blend(tl.load(exp_avg + offsets, mask=mask, other=0.0), g, number(share1, DTYPE))
    v = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0)
    v = number(beta2, DTYPE) * v + number(share2, DTYPE) * g * g
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    if max_exp_avg_sq is not None:
        largest = tl.load(max_exp_avg_sq + offsets, mask=mask, other=0.0)
        v = tl.where((v > largest) | (v != v), v, largest)  # nan stays nan, whichever it was
        tl.store(max_exp_avg_sq + offsets, v, mask=mask)
    denom = divide(root(v), chosen(numbers, ROOT_CORRECTION2, root_correction2, DTYPE)) + number(eps, DTYPE)
    store_param(param, model_param, offsets, p - chosen(numbers, STEP_SIZE, step_size, DTYPE) * divide(m, denom), mask)


@triton.jit
def rmsprop(
    param,
    grad,
    square_avg,
    grad_avg,
    momentum_buffer,
    model_param,
    grad_scale,
    numbers,
    numel: tl.int64,
    lr: tl.float64,
    alpha: tl.float64,
    share: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
    momentum: tl.float64,
    L2: tl.constexpr,
    DECOUPLED: tl.constexpr,
    EPS_INSIDE_SQRT: tl.constexpr,
    LR_IN_MOMENTUM: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``share``: 1 − alpha."""
    offsets = block_offsets(BLOCK)
    mask = unless_overflowed(numbers, offsets < numel)
    p, g = load_decayed(
        param, grad, grad_scale, offsets, mask, number(weight_decay, DTYPE), L2, DECOUPLED, MAXIMIZE, DTYPE
    )
    s = tl.load(square_avg + offsets, mask=mask, other=0.0)
    s = number(alpha, DTYPE) * s + number(share, DTYPE) * g * g
    tl.store(square_avg + offsets, s, mask=mask)
    if grad_avg is not None:
        mean = blend(tl.load(grad_avg + offsets, mask=mask, other=0.0), g, number(share, DTYPE))
        tl.store(grad_avg + offsets, mean, mask=mask)
        s = s - mean * mean
    denom = root(s + number(eps, DTYPE)) if EPS_INSIDE_SQRT else root(s) + number(eps, DTYPE)
    update = divide(g, denom)
    if LR_IN_MOMENTUM:
        update = chosen(numbers, LR, lr, DTYPE) * update
    if momentum_buffer is not None:
        b = tl.load(momentum_buffer + offsets, mask=mask, other=0.0)
        update = number(momentum, DTYPE) * b + update
        tl.store(momentum_buffer + offsets, update, mask=mask)
    if not LR_IN_MOMENTUM:
        update = chosen(numbers, LR, lr, DTYPE) * update
    store_param(param, model_param, offsets, p - update, mask)


@triton.jit
def adadelta(
    param,
    grad,
    square_avg,
    acc_delta,
    model_param,
    grad_scale,
    numbers,
    numel: tl.int64,
    lr: tl.float64,
    rho: tl.float64,
    share: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
    L2: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``share``: 1 − rho."""
    offsets = block_offsets(BLOCK)
    mask = unless_overflowed(numbers, offsets < numel)
    p, g = load_decayed(param, grad, grad_scale, offsets, mask, number(weight_decay, DTYPE), L2, False, MAXIMIZE, DTYPE)
    s = tl.load(square_avg + offsets, mask=mask, other=0.0)
    s = number(rho, DTYPE) * s + number(share, DTYPE) * g * g
    tl.store(square_avg + offsets, s, mask=mask)
    a = tl.load(acc_delta + offsets, mask=mask, other=0.0)
    delta = divide(root(a + number(eps, DTYPE)), root(s + number(eps, DTYPE))) * g
    a = number(rho, DTYPE) * a + number(share, DTYPE) * delta * delta
    tl.store(acc_delta + offsets, a, mask=mask)
    store_param(param, model_param, offsets, p - chosen(numbers, LR, lr, DTYPE) * delta, mask)


@triton.jit
def adagrad(
    param,
    grad,
    square_sum,
    model_param,
    grad_scale,
    numbers,
    numel: tl.int64,
    lr: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
    L2: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``weight_decay``: see ``load_decayed``."""
    offsets = block_offsets(BLOCK)
    mask = unless_overflowed(numbers, offsets < numel)
    decay = chosen(numbers, KEPT, weight_decay, DTYPE) if DECOUPLED else number(weight_decay, DTYPE)
    p, g = load_decayed(param, grad, grad_scale, offsets, mask, decay, L2, DECOUPLED, MAXIMIZE, DTYPE)
    s = tl.load(square_sum + offsets, mask=mask, other=0.0) + g * g
    tl.store(square_sum + offsets, s, mask=mask)
    update = divide(g, root(s) + number(eps, DTYPE))
    store_param(param, model_param, offsets, p - chosen(numbers, LR, lr, DTYPE) * update, mask)
