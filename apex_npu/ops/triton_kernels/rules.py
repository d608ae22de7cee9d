# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules. An elementwise one is one launch, which reads and writes every operand once.

LAMB takes a pass for moments, directions and parts of both norms, one for ratios, and one for parameters.

Each kernel widens gradients and parameters to the states' dtype, applies the rule of ``apex_npu.ops.elementwise``, and
rounds and stores the results; ``formats.py`` loads and stores. Options are constants: Triton compiles a kernel for each
combination of them and of missing operands (None).
"""

from __future__ import annotations

import triton
import triton.language as tl

from apex_npu.ops.triton_kernels.arithmetic import (
    CORRECTION1,
    KEPT,
    LATER,
    LR,
    ROOT_CORRECTION2,
    STEP_SIZE,
    blend,
    chosen,
    divide,
    number,
    root,
    unless_overflowed,
)
from apex_npu.ops.triton_kernels.formats import (
    element_offsets,
    find_place,
    load_decayed,
    load_param,
    load_state,
    store_param,
    store_state,
)
from apex_npu.ops.triton_kernels.sums import chunk_offsets, dot


@triton.jit
def sgd(
    param,
    grad,
    momentum_buffer,
    grad_scale,
    numbers,
    encoding,
    numel: tl.int64,
    count: tl.float64,
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
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step by SGD. ``share``: 1 − dampening. FIRST is not used if there are ``numbers``."""
    offsets, mask = element_offsets(encoding, numbers, numel, ALIGNED, BLOCK)
    place = find_place(encoding, numbers, count)
    decay = chosen(numbers, KEPT, weight_decay, DTYPE) if DECOUPLED else number(weight_decay, DTYPE)
    p, update = load_decayed(
        param, grad, grad_scale, encoding, offsets, mask, decay, L2, DECOUPLED, MAXIMIZE, DTYPE, ALIGNED, BLOCK
    )
    if momentum_buffer is not None:
        if FIRST:
            b = update
        else:
            b = load_state(momentum_buffer, encoding, place, 0, offsets, mask, BLOCK)
            b = number(momentum, DTYPE) * b + number(share, DTYPE) * update
            if numbers is not None:
                b = tl.where(tl.load(numbers + LATER) != 0, b, update)
        store_state(momentum_buffer, encoding, place, 0, offsets, b, mask, BLOCK)
        update = number(share, DTYPE) * update + number(momentum, DTYPE) * b if NESTEROV else b
    p = p - chosen(numbers, LR, lr, DTYPE) * update
    store_param(param, encoding, place, offsets, p, mask, STOCHASTIC, BLOCK)


@triton.jit
def adam(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    grad_scale,
    numbers,
    encoding,
    numel: tl.int64,
    count: tl.float64,
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
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step by Adam. ``share``: 1 − beta. ``step_size``: lr / (1 − beta1^step)."""
    offsets, mask = element_offsets(encoding, numbers, numel, ALIGNED, BLOCK)
    place = find_place(encoding, numbers, count)
    decay = chosen(numbers, KEPT, weight_decay, DTYPE) if DECOUPLED else number(weight_decay, DTYPE)
    p, g = load_decayed(
        param, grad, grad_scale, encoding, offsets, mask, decay, L2, DECOUPLED, MAXIMIZE, DTYPE, ALIGNED, BLOCK
    )
    m = blend(load_state(exp_avg, encoding, place, 0, offsets, mask, BLOCK), g, number(share1, DTYPE))
    v = load_state(exp_avg_sq, encoding, place, 1, offsets, mask, BLOCK)
    v = number(beta2, DTYPE) * v + number(share2, DTYPE) * g * g
    store_state(exp_avg, encoding, place, 0, offsets, m, mask, BLOCK)
    store_state(exp_avg_sq, encoding, place, 1, offsets, v, mask, BLOCK)
    if max_exp_avg_sq is not None:
        largest = load_state(max_exp_avg_sq, encoding, place, 2, offsets, mask, BLOCK)
        v = tl.where((v > largest) | (v != v), v, largest)  # nan in either stays nan
        store_state(max_exp_avg_sq, encoding, place, 2, offsets, v, mask, BLOCK)
    denom = divide(root(v), chosen(numbers, ROOT_CORRECTION2, root_correction2, DTYPE)) + number(eps, DTYPE)
    p = p - chosen(numbers, STEP_SIZE, step_size, DTYPE) * divide(m, denom)
    store_param(param, encoding, place, offsets, p, mask, STOCHASTIC, BLOCK)


@triton.jit
def rmsprop(
    param,
    grad,
    square_avg,
    grad_avg,
    momentum_buffer,
    grad_scale,
    numbers,
    encoding,
    numel: tl.int64,
    count: tl.float64,
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
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step by RMSprop. ``share``: 1 − alpha."""
    offsets, mask = element_offsets(encoding, numbers, numel, ALIGNED, BLOCK)
    place = find_place(encoding, numbers, count)
    rate, decay = chosen(numbers, LR, lr, DTYPE), number(weight_decay, DTYPE)
    if DECOUPLED:
        decay = tl.where(rate == 0, 1.0, decay)
    p, g = load_decayed(
        param, grad, grad_scale, encoding, offsets, mask, decay, L2, DECOUPLED, MAXIMIZE, DTYPE, ALIGNED, BLOCK
    )
    s = load_state(square_avg, encoding, place, 0, offsets, mask, BLOCK)
    s = number(alpha, DTYPE) * s + number(share, DTYPE) * g * g
    store_state(square_avg, encoding, place, 0, offsets, s, mask, BLOCK)
    if grad_avg is not None:
        mean = blend(load_state(grad_avg, encoding, place, 1, offsets, mask, BLOCK), g, number(share, DTYPE))
        store_state(grad_avg, encoding, place, 1, offsets, mean, mask, BLOCK)
        s = s - mean * mean
    denom = root(s + number(eps, DTYPE)) if EPS_INSIDE_SQRT else root(s) + number(eps, DTYPE)
    update = divide(g, denom)
    if LR_IN_MOMENTUM:
        update = rate * update
    if momentum_buffer is not None:
        b = load_state(momentum_buffer, encoding, place, 2, offsets, mask, BLOCK)
        update = number(momentum, DTYPE) * b + update
        store_state(momentum_buffer, encoding, place, 2, offsets, update, mask, BLOCK)
    if not LR_IN_MOMENTUM:
        update = rate * update
    p = p - update
    store_param(param, encoding, place, offsets, p, mask, STOCHASTIC, BLOCK)


@triton.jit
def adadelta(
    param,
    grad,
    square_avg,
    acc_delta,
    grad_scale,
    numbers,
    encoding,
    numel: tl.int64,
    count: tl.float64,
    lr: tl.float64,
    rho: tl.float64,
    share: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
    L2: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step by Adadelta. ``share``: 1 − rho."""
    offsets, mask = element_offsets(encoding, numbers, numel, ALIGNED, BLOCK)
    place = find_place(encoding, numbers, count)
    p, g = load_decayed(
        param,
        grad,
        grad_scale,
        encoding,
        offsets,
        mask,
        number(weight_decay, DTYPE),
        L2,
        False,
        MAXIMIZE,
        DTYPE,
        ALIGNED,
        BLOCK,
    )
    s = load_state(square_avg, encoding, place, 0, offsets, mask, BLOCK)
    s = number(rho, DTYPE) * s + number(share, DTYPE) * g * g
    store_state(square_avg, encoding, place, 0, offsets, s, mask, BLOCK)
    a = load_state(acc_delta, encoding, place, 1, offsets, mask, BLOCK)
    delta = divide(root(a + number(eps, DTYPE)), root(s + number(eps, DTYPE))) * g
    a = number(rho, DTYPE) * a + number(share, DTYPE) * delta * delta
    store_state(acc_delta, encoding, place, 1, offsets, a, mask, BLOCK)
    p = p - chosen(numbers, LR, lr, DTYPE) * delta
    store_param(param, encoding, place, offsets, p, mask, STOCHASTIC, BLOCK)


@triton.jit
def adagrad(
    param,
    grad,
    square_sum,
    grad_scale,
    numbers,
    encoding,
    numel: tl.int64,
    count: tl.float64,
    lr: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
    L2: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step by Adagrad. ``weight_decay``: see ``load_decayed``."""
    offsets, mask = element_offsets(encoding, numbers, numel, ALIGNED, BLOCK)
    place = find_place(encoding, numbers, count)
    decay = chosen(numbers, KEPT, weight_decay, DTYPE) if DECOUPLED else number(weight_decay, DTYPE)
    p, g = load_decayed(
        param, grad, grad_scale, encoding, offsets, mask, decay, L2, DECOUPLED, MAXIMIZE, DTYPE, ALIGNED, BLOCK
    )
    s = load_state(square_sum, encoding, place, 0, offsets, mask, BLOCK) + g * g
    store_state(square_sum, encoding, place, 0, offsets, s, mask, BLOCK)
    update = divide(g, root(s) + number(eps, DTYPE))
    p = p - chosen(numbers, LR, lr, DTYPE) * update
    store_param(param, encoding, place, offsets, p, mask, STOCHASTIC, BLOCK)


@triton.jit
def lamb_directions(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    grad_scale,
    numbers,
    encoding,
    direction,
    parts,
    begins,
    ends,
    chunks: tl.int64,
    count: tl.float64,
    lr: tl.float64,
    beta1: tl.float64,
    beta3: tl.float64,
    beta2: tl.float64,
    share2: tl.float64,
    eps: tl.float64,
    correction1: tl.float64,
    root_correction2: tl.float64,
    l2: tl.float64,
    decay: tl.float64,
    ADAPT: tl.constexpr,
    AVERAGE: tl.constexpr,
    L2: tl.constexpr,
    DECAY: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write directions, or without ADAPT the whole step. ``AVERAGE``: beta3 is 1 − beta1. ``share2``: 1 − beta2."""
    offsets, mask, inside = chunk_offsets(begins, ends, ALIGNED, BLOCK)
    mask = unless_overflowed(numbers, mask)
    place = find_place(encoding, numbers, count)
    p, g = load_decayed(
        param, grad, grad_scale, encoding, offsets, mask, number(l2, DTYPE), L2, False, MAXIMIZE, DTYPE, ALIGNED, BLOCK
    )
    m = load_state(exp_avg, encoding, place, 0, offsets, mask, BLOCK)
    m = blend(m, g, number(beta3, DTYPE)) if AVERAGE else number(beta1, DTYPE) * m + number(beta3, DTYPE) * g
    v = load_state(exp_avg_sq, encoding, place, 1, offsets, mask, BLOCK)
    v = number(beta2, DTYPE) * v + number(share2, DTYPE) * g * g
    store_state(exp_avg, encoding, place, 0, offsets, m, mask, BLOCK)
    store_state(exp_avg_sq, encoding, place, 1, offsets, v, mask, BLOCK)
    u = divide(m, divide(root(v), chosen(numbers, ROOT_CORRECTION2, root_correction2, DTYPE)) + number(eps, DTYPE))
    u = divide(u, chosen(numbers, CORRECTION1, correction1, DTYPE))
    if DECAY:
        u = u + number(decay, DTYPE) * p
    if ADAPT:
        tl.store(direction + offsets, u, mask=mask)
        tl.store(parts + tl.program_id(0), dot(p, p, inside))
        tl.store(parts + chunks + tl.program_id(0), dot(u, u, inside))
    else:
        p = p - chosen(numbers, LR, lr, DTYPE) * u
        store_param(param, encoding, place, offsets, p, mask, STOCHASTIC, BLOCK)


@triton.jit
def lamb_ratios(
    parts, ratios, firsts, chunks: tl.int64, max_weight_norm: tl.float64, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the ratio r of each segment."""
    segment = tl.program_id(0)
    first, last = tl.load(firsts + segment), tl.load(firsts + segment + 1)
    weights = tl.zeros((BLOCK,), tl.float64)
    directions = tl.zeros((BLOCK,), tl.float64)
    for begin in range(first, last, BLOCK):  # one loop, so that neither sum waits for the other's memory
        offsets = begin + tl.arange(0, BLOCK)
        weights += tl.load(parts + offsets, mask=offsets < last, other=0.0)
        directions += tl.load(parts + chunks + offsets, mask=offsets < last, other=0.0)
    weight_norm = tl.sqrt(tl.sum(weights, axis=0)).to(DTYPE)
    norm = tl.sqrt(tl.sum(directions, axis=0)).to(DTYPE)
    unusable = (weight_norm == 0) | (norm == 0)  # nan stays nan, so that an overflow shows
    limit = number(max_weight_norm, DTYPE)
    ratio = divide(tl.where(weight_norm > limit, limit, weight_norm), tl.where(unusable, number(1.0, DTYPE), norm))
    tl.store(ratios + segment, tl.where(unusable, number(1.0, DTYPE), ratio))


@triton.jit
def lamb_step(
    param,
    direction,
    ratios,
    numbers,
    encoding,
    begins,
    ends,
    owners,
    count: tl.float64,
    lr: tl.float64,
    DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the new p: p − lr · r · u."""
    offsets, mask, _ = chunk_offsets(begins, ends, ALIGNED, BLOCK)
    mask = unless_overflowed(numbers, mask)
    place = find_place(encoding, numbers, count)
    p = load_param(param, encoding, offsets, mask, DTYPE)
    rate = chosen(numbers, LR, lr, DTYPE) * tl.load(ratios + tl.load(owners + tl.program_id(0)))
    u = tl.load(direction + offsets, mask=mask, other=0.0)
    store_param(param, encoding, place, offsets, p - rate * u, mask, STOCHASTIC, BLOCK)
