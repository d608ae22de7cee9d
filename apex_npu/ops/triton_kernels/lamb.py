# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""LAMB: one pass for moments, directions and parts of both norms, one for ratios, and one for parameters."""

from __future__ import annotations

import triton
import triton.language as tl

from apex_npu.ops.triton_kernels.arithmetic import blend, divide, number, root
from apex_npu.ops.triton_kernels.formats import (
    find_place,
    load_decayed,
    load_param,
    load_state,
    store_param,
    store_state,
)
from apex_npu.ops.triton_kernels.numbers import CORRECTION1, LR, ROOT_CORRECTION2, chosen, unless_overflowed
from apex_npu.ops.triton_kernels.sums import chunk_offsets, dot


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
