# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Copies gradients into their slots, or multiplies or checks them in place, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from apex_npu.ops.triton_kernels.arithmetic import number
from apex_npu.ops.triton_kernels.chunks import ROW_COLUMNS
from apex_npu.ops.triton_kernels.sums import range_offsets

_COLUMNS = tl.constexpr(ROW_COLUMNS)


@triton.jit
def take_addressed(
    flat,
    chunks,
    addresses,
    found_inf,
    factor: tl.float64,
    SOURCE: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy gradients into slots; for ``chunks`` and ``addresses`` see ``plans.take_addressed``."""
    row = chunks + tl.program_id(0).to(tl.int64) * _COLUMNS
    address = tl.load(addresses + tl.load(row + 2))
    if address != 0:
        offsets, mask, inside = range_offsets(row, row + 1, ALIGNED, BLOCK)
        grad = load_at(address, offsets, tl.load(row + 1), inside, SOURCE, ALIGNED)
        if SCALED or found_inf is not None:
            wide = grad.to(DTYPE)
            if found_inf is not None:
                look(is_bad(wide) & inside, found_inf)
            grad = wide * number(factor, DTYPE) if SCALED else grad
        # Writing ends at the next multiple of 16, so that padding stays 0.
        value = grad.to(flat.dtype.element_ty)
        tl.store(flat + offsets, tl.where(inside, value, tl.zeros_like(value)), mask=mask)


@triton.jit
def scale_listed(
    rows,
    addresses,
    found_inf,
    factor_at,
    factor: tl.float64,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply gradients in place. ``rows``, ``addresses``: see ``formats.Encoding``. ``factor_at``: a pointer."""
    row = rows + tl.program_id(0).to(tl.int64) * _COLUMNS
    address = tl.load(addresses + tl.load(row + 2))
    if address != 0:
        offsets, _, inside = range_offsets(row, row + 1, ALIGNED, BLOCK)
        grad = load_at(address, offsets, tl.load(row + 1), inside, SOURCE, ALIGNED)
        wide = grad.to(DTYPE)
        if found_inf is not None:
            look(is_bad(wide) & inside, found_inf)
        share = number(factor, DTYPE) if factor_at is None else tl.load(factor_at).to(DTYPE)
        value = (wide * share).to(grad.dtype)
        tl.store(address.to(tl.pointer_type(SOURCE)) + offsets, value, mask=inside)


@triton.jit
def check_listed(found_inf, grads, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Set the flag if a gradient in ``grads``, a ``formats.Encoding``, is not finite."""
    look(is_bad(load_listed(grads, ALIGNED, BLOCK, DTYPE, tl.program_id(0).to(tl.int64))), found_inf)


@triton.jit
def listed_square_parts(parts, grads, chunks: tl.int64, programs: tl.int64, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write each program's share of the sum of squares: every programs-th chunk. ``grads``: a ``formats.Encoding``."""
    total = tl.zeros((BLOCK,), tl.float64)
    for chunk in range(tl.program_id(0).to(tl.int64), chunks, programs):
        value = load_listed(grads, ALIGNED, BLOCK, tl.float64, chunk)
        total = tl.fma(value, value, total)
    tl.store(parts + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def look(bad, found_inf):
    """Set the flag if an element is bad."""
    tl.store(found_inf, 1.0, mask=tl.max(bad.to(tl.int32), axis=0) != 0)


@triton.jit
def load_listed(grads, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, program):
    """Load the elements of the chunk of ``program`` as DTYPE; 0 outside of it, and for a missing gradient."""
    row = grads.rows + program * _COLUMNS
    offsets, _, inside = range_offsets(row, row + 1, ALIGNED, BLOCK)
    end, address = tl.load(row + 1), tl.load(grads.addresses + tl.load(row + 2))
    inside = inside & (address != 0)
    if grads.narrow is None:
        grad = load_at(address, offsets, end, inside, grads.wide.dtype.element_ty, ALIGNED).to(DTYPE)
    elif address % 2 == 1:
        grad = load_at(address - 1, offsets, end, inside, grads.narrow.dtype.element_ty, ALIGNED).to(DTYPE)
    else:
        grad = load_at(address, offsets, end, inside, grads.wide.dtype.element_ty, ALIGNED).to(DTYPE)
    return tl.where(inside, grad, tl.zeros_like(grad))


@triton.jit
def load_at(address, offsets, end, inside, SOURCE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the elements at ``offsets`` from an address, if ``inside``."""
    source = address.to(tl.pointer_type(SOURCE)) + offsets
    if ALIGNED:
        if address % 16 == 0:
            # Read 16 bytes at a time, the last ones whole: bytes beyond the end belong to the same allocation.
            PIECE: tl.constexpr = 128 // SOURCE.primitive_bitwidth
            whole = (offsets < (end + (PIECE - 1)) // PIECE * PIECE) & (address != 0)
            grad = tl.load(tl.multiple_of(source, 16), mask=whole, other=0.0)
        else:
            grad = tl.load(source, mask=inside, other=0.0)
    else:
        grad = tl.load(source, mask=inside, other=0.0)
    return grad


@triton.jit
def is_bad(x):
    """Return whether an element is inf or nan: all bits of its exponent are set."""
    if x.dtype == tl.float64:
        return (x.to(tl.int64, bitcast=True) & 0x7FF0000000000000) == 0x7FF0000000000000
    else:
        return (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
