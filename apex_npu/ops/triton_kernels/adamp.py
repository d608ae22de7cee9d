# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AdamP: moments, direction and parts of four sums in one pass; the sums of rows; what is projected; the parameters."""

from __future__ import annotations

import triton
import triton.language as tl

from apex_npu.ops.triton_kernels.arithmetic import blend, divide, number, root
from apex_npu.ops.triton_kernels.formats import (
    find_place,
    load_grad,
    load_param,
    load_state,
    store_param,
    store_state,
)
from apex_npu.ops.triton_kernels.numbers import (
    KEPT,
    KEPT_IF_PROJECTED,
    ROOT_CORRECTION2,
    STEP_SIZE,
    chosen,
    unless_overflowed,
)
from apex_npu.ops.triton_kernels.sums import chunk_offsets, dot, sum_of_parts


@triton.jit
def adamp_directions(
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
    beta1: tl.float64,
    share1: tl.float64,
    beta2: tl.float64,
    share2: tl.float64,
    eps: tl.float64,
    root_correction2: tl.float64,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The direction u before it is projected, and parts of sums: see ``store_parts``. ``share``: 1 − beta.

    Where states are encoded, chunks are of parameters, not of rows, and there are no parts.
    """
    offsets, mask, inside = chunk_offsets(begins, ends, ALIGNED, BLOCK)
    mask = unless_overflowed(numbers, mask)
    place = find_place(encoding, numbers, count)
    p = load_param(param, encoding, offsets, mask, DTYPE)
    g = load_grad(grad, grad_scale, offsets, mask, MAXIMIZE, DTYPE)
    m = blend(load_state(exp_avg, encoding, place, 0, offsets, mask, BLOCK), g, number(share1, DTYPE))
    v = load_state(exp_avg_sq, encoding, place, 1, offsets, mask, BLOCK)
    v = number(beta2, DTYPE) * v + number(share2, DTYPE) * g * g
    store_state(exp_avg, encoding, place, 0, offsets, m, mask, BLOCK)
    store_state(exp_avg_sq, encoding, place, 1, offsets, v, mask, BLOCK)
    if NESTEROV:
        m = number(beta1, DTYPE) * m + number(share1, DTYPE) * g
    u = divide(m, divide(root(v), chosen(numbers, ROOT_CORRECTION2, root_correction2, DTYPE)) + number(eps, DTYPE))
    tl.store(direction + offsets, u, mask=mask)
    if encoding.places is None:
        store_parts(parts, p, g, u, inside, chunks)


@triton.jit
def adamp_parts(
    param,
    grad,
    grad_scale,
    numbers,
    encoding,
    direction,
    parts,
    begins,
    ends,
    chunks: tl.int64,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What ``adamp_directions`` leaves out."""
    offsets, mask, inside = chunk_offsets(begins, ends, ALIGNED, BLOCK)
    mask = unless_overflowed(numbers, mask)
    p = load_param(param, encoding, offsets, mask, DTYPE)
    g = load_grad(grad, grad_scale, offsets, mask, MAXIMIZE, DTYPE)
    store_parts(parts, p, g, tl.load(direction + offsets, mask=mask, other=0.0), inside, chunks)


@triton.jit
def store_parts(parts, p, g, u, inside, chunks):
    """Of p · g, g · g, p · p and p · u."""
    part = parts + tl.program_id(0)
    tl.store(part, dot(p, g, inside))
    tl.store(part + chunks, dot(g, g, inside))
    tl.store(part + 2 * chunks, dot(p, p, inside))
    tl.store(part + 3 * chunks, dot(p, u, inside))


@triton.jit
def adamp_rows(parts, sums, firsts, chunks: tl.int64, rows: tl.int64, BLOCK: tl.constexpr):
    """The four sums of each row."""
    row = tl.program_id(0)
    first, last = tl.load(firsts + row), tl.load(firsts + row + 1)
    for kind in range(4):
        tl.store(sums + kind * rows + row, sum_of_parts(parts + kind * chunks, first, last, BLOCK))


@triton.jit
def cosine(pg, gg, pp, eps):
    """|cos(g, p)|, of sums."""
    return tl.abs(pg) / ((tl.sqrt(gg) + eps) * (tl.sqrt(pp) + eps))


@triton.jit
def adamp_decisions(
    sums,
    firsts,
    row_limit,
    whole_limit,
    decisions,
    rows: tl.int64,
    param_count: tl.int64,
    eps: tl.float64,
    BLOCK: tl.constexpr,
):
    """For each parameter: 1 if its rows are projected, 2 if the whole, else 0; and then its multiple of p in u.

    Parameters are counted from 1; ``param_count`` of them there are.
    """
    index = tl.program_id(0) + 1
    eps64 = number(eps, tl.float64)
    first, last = tl.load(firsts + index - 1), tl.load(firsts + index)
    pg = tl.zeros((BLOCK,), tl.float64)
    gg = tl.zeros((BLOCK,), tl.float64)
    pp = tl.zeros((BLOCK,), tl.float64)
    pu = tl.zeros((BLOCK,), tl.float64)
    cosines = tl.zeros((BLOCK,), tl.float64)
    for begin in range(first, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        inside = offsets < last
        row_pg = tl.load(sums + offsets, mask=inside, other=0.0)
        row_gg = tl.load(sums + rows + offsets, mask=inside, other=0.0)
        row_pp = tl.load(sums + 2 * rows + offsets, mask=inside, other=0.0)
        pu += tl.load(sums + 3 * rows + offsets, mask=inside, other=0.0)
        pg += row_pg
        gg += row_gg
        pp += row_pp
        found = tl.where(inside, cosine(row_pg, row_gg, row_pp, eps64), 0.0)
        # Compared so, a nan is larger than all: such a parameter is not projected.
        cosines = tl.where(found <= cosines, cosines, tl.where(found == found, found, float("inf")))
    whole_pp = tl.sum(pp, axis=0)
    whole = cosine(tl.sum(pg, axis=0), tl.sum(gg, axis=0), whole_pp, eps64)
    by_row = tl.max(cosines, axis=0) < tl.load(row_limit + index).to(tl.float64)
    by_whole = whole < tl.load(whole_limit + index).to(tl.float64)
    norm = tl.sqrt(whole_pp) + eps64
    tl.store(decisions + index, tl.where(by_row, 1.0, tl.where(by_whole, 2.0, 0.0)).to(tl.float64))
    tl.store(decisions + param_count + 1 + index, tl.sum(pu, axis=0) / (norm * norm))


@triton.jit
def adamp_step(
    param,
    model_param,
    direction,
    numbers,
    encoding,
    sums,
    decisions,
    owner,
    begins,
    ends,
    owners,
    rows: tl.int64,
    param_count: tl.int64,
    count: tl.float64,
    step_size: tl.float64,
    kept: tl.float64,
    kept_if_projected: tl.float64,
    eps: tl.float64,
    DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """New p: p · kept − step_size · (u − multiple · p)."""
    offsets, mask, _ = chunk_offsets(begins, ends, ALIGNED, BLOCK)
    mask = unless_overflowed(numbers, mask)
    place = find_place(encoding, numbers, count)
    row = tl.load(owners + tl.program_id(0))
    index = tl.load(owner + row)
    decision = tl.load(decisions + index)
    norm = tl.sqrt(tl.load(sums + 2 * rows + row)) + number(eps, tl.float64)
    of_row = tl.load(sums + 3 * rows + row) / (norm * norm)
    of_whole = tl.load(decisions + param_count + 1 + index)
    multiple = tl.where(decision == 1.0, of_row, tl.where(decision == 2.0, of_whole, 0.0)).to(DTYPE)
    p = load_param(param, encoding, offsets, mask, DTYPE)
    u = tl.load(direction + offsets, mask=mask, other=0.0)
    u = u - multiple * p
    if_projected = chosen(numbers, KEPT_IF_PROJECTED, kept_if_projected, DTYPE)
    p = p * tl.where(decision > 0.0, if_projected, chosen(numbers, KEPT, kept, DTYPE))
    p = p - chosen(numbers, STEP_SIZE, step_size, DTYPE) * u
    store_param(param, model_param, encoding, place, offsets, p, mask, STOCHASTIC, BLOCK, ANYWHERE=True)
