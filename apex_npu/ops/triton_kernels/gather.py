# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients, wherever they are, copied into their slots, multiplied and checked in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from apex_npu.ops.triton_kernels.arithmetic import number
from apex_npu.ops.triton_kernels.sums import range_offsets

COLUMNS = 4  # of the table of chunks: a row is a multiple of 16 bytes, wherever a launch begins
_COLUMNS = tl.constexpr(COLUMNS)


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
    """``chunks``: see ``gather_cuda.AddressTable``; ``addresses``: where ``flat`` would begin around each gradient."""
    row = chunks + tl.program_id(0).to(tl.int64) * _COLUMNS
    address = tl.load(addresses + tl.load(row + 2))
    if address != 0:
        offsets, mask, inside = range_offsets(row, row + 1, ALIGNED, BLOCK)
        grad = load_at(address, offsets, tl.load(row + 1), inside, SOURCE, ALIGNED)
        if SCALED or found_inf is not None:
            wide = grad.to(DTYPE)
            if found_inf is not None:
                bad = tl.max((is_bad(wide) & inside).to(tl.int32), axis=0)
                tl.store(found_inf, 1.0, mask=bad != 0)
            grad = wide * number(factor, DTYPE) if SCALED else grad
        # Up to the next multiple of 16: padding stays 0.
        value = grad.to(flat.dtype.element_ty)
        tl.store(flat + offsets, tl.where(inside, value, tl.zeros_like(value)), mask=mask)


@triton.jit
def load_at(address, offsets, end, inside, SOURCE: tl.constexpr, ALIGNED: tl.constexpr):
    """The elements at ``offsets`` from an address, those ``inside``."""
    source = address.to(tl.pointer_type(SOURCE)) + offsets
    if ALIGNED:
        if address % 16 == 0:
            # Read 16 bytes at once, the last ones whole: what is in them beyond the end is of the same allocation.
            PIECE: tl.constexpr = 128 // SOURCE.primitive_bitwidth
            whole = offsets < (end + (PIECE - 1)) // PIECE * PIECE
            grad = tl.load(tl.multiple_of(source, 16), mask=whole, other=0.0)
        else:
            grad = tl.load(source, mask=inside, other=0.0)
    else:
        grad = tl.load(source, mask=inside, other=0.0)
    return grad


@triton.jit
def is_bad(x):
    """Whether an element is inf or nan: all bits of its exponent are set."""
    if x.dtype == tl.float64:
        return (x.to(tl.int64, bitcast=True) & 0x7FF0000000000000) == 0x7FF0000000000000
    else:
        return (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
