# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Norms and sums, in float64 and in an order that depends only on the sizes; see ``chunks.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from apex_npu.ops.triton_kernels.arithmetic import divide, number


@triton.jit
def chunk_offsets(begins, ends, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of this program's elements, a mask of those to load and store, and a mask of its chunk.

    With ALIGNED, the first mask ends at the next multiple of 16, in padding, so that Triton can move 16 bytes at a
    time.
    """
    return range_offsets(begins + tl.program_id(0), ends + tl.program_id(0), ALIGNED, BLOCK)


@triton.jit
def range_offsets(begin_at, end_at, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Do the same as ``chunk_offsets`` for the chunk whose first and last elements are at these pointers."""
    begin, end = tl.load(begin_at), tl.load(end_at)
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
        offsets = begin + tl.arange(0, BLOCK)
        return offsets, offsets < (end + 15) // 16 * 16, offsets < end
    else:
        offsets = begin + tl.arange(0, BLOCK)
        return offsets, offsets < end, offsets < end


@triton.jit
def dot(a, b, inside):
    """Return the sum of a · b inside."""
    return tl.sum(tl.where(inside, a.to(tl.float64) * b.to(tl.float64), 0.0), axis=0)


@triton.jit
def sum_of_parts(parts, first, last, BLOCK: tl.constexpr):
    """Return the sum of parts[first:last], always in the same order."""
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(first, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        total += tl.load(parts + offsets, mask=offsets < last, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def square_parts(x, parts, numel: tl.int64, programs: tl.int64, BLOCK: tl.constexpr):
    """Write each program's share of the sum of squares: every programs-th block."""
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, programs * BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        value = tl.load(x + offsets, mask=offsets < numel, other=0.0).to(tl.float64)
        total = tl.fma(value, value, total)
    tl.store(parts + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def root_of_parts(
    parts,
    result,
    found_inf,
    coefficient,
    count: tl.int64,
    max_norm: tl.float64,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the norm from float64 parts of its square, which for elements up to float32 do not overflow."""
    total = sum_of_parts(parts, 0, count, BLOCK)
    norm = tl.sqrt(total).to(DTYPE)
    tl.store(result, norm)
    if coefficient is not None:
        one = number(1.0, DTYPE)
        share = divide(one, norm + number(1e-6, DTYPE)) * number(max_norm, DTYPE)
        tl.store(coefficient, tl.where(share > one, one, share))  # nan is not greater
    if found_inf is not None:
        tl.store(found_inf, tl.where(total < float("inf"), tl.load(found_inf), 1.0))  # nan is not less


@triton.jit
def dot_parts(a, b, parts, begins, ends, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write each chunk's sum of a · b."""
    offsets, mask, inside = chunk_offsets(begins, ends, ALIGNED, BLOCK)
    product = dot(tl.load(a + offsets, mask=mask, other=0.0), tl.load(b + offsets, mask=mask, other=0.0), inside)
    tl.store(parts + tl.program_id(0), product)


@triton.jit
def segment_sums(parts, sums, firsts, BLOCK: tl.constexpr):
    """Write each segment's sum of its chunks' parts."""
    segment = tl.program_id(0)
    total = sum_of_parts(parts, tl.load(firsts + segment), tl.load(firsts + segment + 1), BLOCK)
    tl.store(sums + segment, total.to(sums.dtype.element_ty))


@triton.jit
def segment_add(x, y, factors, begins, ends, owners, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the new x: x + factor · y in every chunk."""
    offsets, mask, inside = chunk_offsets(begins, ends, ALIGNED, BLOCK)
    factor = tl.load(factors + tl.load(owners + tl.program_id(0))).to(DTYPE)
    old = tl.load(x + offsets, mask=mask, other=0.0)
    new = old.to(DTYPE) + factor * tl.load(y + offsets, mask=mask, other=0.0).to(DTYPE)
    tl.store(x + offsets, tl.where(inside, new.to(x.dtype.element_ty), old), mask=mask)
