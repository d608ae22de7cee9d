# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AdamP: moments, direction and parts of four sums in one pass; the sums of rows; what is projected; the parameters.

``rows.py`` tells which elements a program has.
"""

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
from apex_npu.ops.triton_kernels.rows import CHUNK_COLUMNS, TILE_COLUMNS, UNIT, UNITS
from apex_npu.ops.triton_kernels.sums import chunk_offsets

_UNIT, _UNITS = tl.constexpr(UNIT), tl.constexpr(UNITS)
_TILE_COLUMNS, _CHUNK_COLUMNS = tl.constexpr(TILE_COLUMNS), tl.constexpr(CHUNK_COLUMNS)


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
    begins,
    ends,
    tiles,
    parts,
    part_count: tl.int64,
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
    """The direction u before it is projected, and parts of sums: see ``Rows.tiles``. ``share``: 1 − beta.

    Where states are encoded there are ``begins`` and ``ends`` of chunks instead of tiles, and no parts.
    """
    rates = (
        number(beta1, DTYPE),
        number(share1, DTYPE),
        number(beta2, DTYPE),
        number(share2, DTYPE),
        number(eps, DTYPE),
        chosen(numbers, ROOT_CORRECTION2, root_correction2, DTYPE),
    )
    operands = (param, grad, exp_avg, exp_avg_sq, grad_scale, numbers, encoding, direction)
    if tiles is None:
        offsets, mask, _ = chunk_offsets(begins, ends, ALIGNED, BLOCK)
        place = find_place(encoding, numbers, count)
        step_moments(operands, rates, place, offsets, mask, NESTEROV, MAXIMIZE, DTYPE, BLOCK)
    else:
        tile = tiles + tl.program_id(0).to(tl.int64) * _TILE_COLUMNS
        place = find_place(encoding, numbers, count)
        if tl.load(tile + 5) % 2 == 1:
            offsets, mask, inside, used = range_of_tile(tile)
            p, g, u = step_moments(operands, rates, place, offsets, mask, NESTEROV, MAXIMIZE, DTYPE, BLOCK)
            store_parts(parts, part_count, tile, p, g, u, inside, used)
        else:
            offsets, inside, used = units_of_tile(tile)
            p, g, u = step_moments(operands, rates, place, offsets, inside, NESTEROV, MAXIMIZE, DTYPE, BLOCK)
            store_parts(parts, part_count, tile, p, g, u, inside, used)


@triton.jit
def step_moments(
    operands,
    rates,
    place,
    offsets,
    mask,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """p, g and u; moments and u are stored."""
    param, grad, exp_avg, exp_avg_sq, grad_scale, numbers, encoding, direction = operands
    beta1, share1, beta2, share2, eps, root_correction2 = rates
    mask = unless_overflowed(numbers, mask)
    p = load_param(param, encoding, offsets, mask, DTYPE)
    g = load_grad(grad, grad_scale, offsets, mask, MAXIMIZE, DTYPE)
    m = blend(load_state(exp_avg, encoding, place, 0, offsets, mask, BLOCK), g, share1)
    v = load_state(exp_avg_sq, encoding, place, 1, offsets, mask, BLOCK)
    v = beta2 * v + share2 * g * g
    store_state(exp_avg, encoding, place, 0, offsets, m, mask, BLOCK)
    store_state(exp_avg_sq, encoding, place, 1, offsets, v, mask, BLOCK)
    if NESTEROV:
        m = beta1 * m + share1 * g
    u = divide(m, divide(root(v), root_correction2) + eps)
    tl.store(direction + offsets, u, mask=mask)
    return p, g, u


@triton.jit
def adamp_parts(
    param,
    grad,
    grad_scale,
    numbers,
    encoding,
    direction,
    tiles,
    parts,
    part_count: tl.int64,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What ``adamp_directions`` leaves out where states are encoded."""
    tile = tiles + tl.program_id(0).to(tl.int64) * _TILE_COLUMNS
    if tl.load(tile + 5) % 2 == 1:
        offsets, _, inside, used = range_of_tile(tile)
    else:
        offsets, inside, used = units_of_tile(tile)
    mask = unless_overflowed(numbers, inside)
    p = load_param(param, encoding, offsets, mask, DTYPE)
    g = load_grad(grad, grad_scale, offsets, mask, MAXIMIZE, DTYPE)
    u = tl.load(direction + offsets, mask=mask, other=0.0)
    store_parts(parts, part_count, tile, p, g, u, inside, used)


@triton.jit
def range_of_tile(tile):
    """The elements of a tile that is a range, a unit in each row.

    And which of them may be read and written, into padding; which are inside; and which units there are.
    """
    begin, end = tl.multiple_of(tl.load(tile), 16), tl.load(tile + 1)
    units = begin + tl.arange(0, _UNITS) * _UNIT
    offsets = units[:, None] + tl.arange(0, _UNIT)[None, :]
    return offsets, offsets < (end + 15) // 16 * 16, offsets < end, units < end


@triton.jit
def units_of_tile(tile):
    """The elements of any tile, a unit in each row; which of them are inside; and which units there are."""
    begin, end, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    per_row = ((length + _UNIT - 1) // _UNIT).to(tl.int32)
    unit = tl.load(tile + 3).to(tl.int32) + tl.arange(0, _UNITS)
    row_begin = begin + (unit // per_row).to(tl.int64) * length
    units = row_begin + (unit % per_row).to(tl.int64) * _UNIT
    unit_end = tl.minimum(tl.minimum(units + _UNIT, row_begin + length), end)
    offsets = units[:, None] + tl.arange(0, _UNIT)[None, :]
    return offsets, offsets < unit_end[:, None], units < end


@triton.jit
def store_parts(parts, part_count, tile, p, g, u, inside, used):
    """Of p · g, g · g, p · p and p · u: one for each unit that is ``used``, or one for the tile, or none."""
    part = tl.load(tile + 4)
    if part >= 0:
        p64, g64, u64 = p.to(tl.float64), g.to(tl.float64), u.to(tl.float64)
        pg = tl.sum(tl.where(inside, p64 * g64, 0.0), axis=1)
        gg = tl.sum(tl.where(inside, g64 * g64, 0.0), axis=1)
        pp = tl.sum(tl.where(inside, p64 * p64, 0.0), axis=1)
        pu = tl.sum(tl.where(inside, p64 * u64, 0.0), axis=1)
        if tl.load(tile + 5) >= 2:
            one = parts + part
            tl.store(one, tl.sum(pg, axis=0))
            tl.store(one + part_count, tl.sum(gg, axis=0))
            tl.store(one + 2 * part_count, tl.sum(pp, axis=0))
            tl.store(one + 3 * part_count, tl.sum(pu, axis=0))
        else:
            each = parts + part + tl.arange(0, _UNITS).to(tl.int64)
            tl.store(each, pg, mask=used)
            tl.store(each + part_count, gg, mask=used)
            tl.store(each + 2 * part_count, pp, mask=used)
            tl.store(each + 3 * part_count, pu, mask=used)


@triton.jit
def adamp_rows(parts, sums, first_parts, part_count: tl.int64, rows: tl.int64, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The four sums of each row, of ROWS in a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    first = tl.load(first_parts + row, mask=exists, other=0)
    last = tl.load(first_parts + (row + 1), mask=exists, other=0)
    pg = tl.zeros((ROWS, BLOCK), tl.float64)
    gg = tl.zeros((ROWS, BLOCK), tl.float64)
    pp = tl.zeros((ROWS, BLOCK), tl.float64)
    pu = tl.zeros((ROWS, BLOCK), tl.float64)
    for begin in range(0, tl.max(last - first, axis=0), BLOCK):
        part = (first + begin)[:, None] + tl.arange(0, BLOCK)[None, :]
        inside = part < last[:, None]
        pg += tl.load(parts + part, mask=inside, other=0.0)
        gg += tl.load(parts + part_count + part, mask=inside, other=0.0)
        pp += tl.load(parts + 2 * part_count + part, mask=inside, other=0.0)
        pu += tl.load(parts + 3 * part_count + part, mask=inside, other=0.0)
    tl.store(sums + row, tl.sum(pg, axis=1), mask=exists)
    tl.store(sums + rows + row, tl.sum(gg, axis=1), mask=exists)
    tl.store(sums + 2 * rows + row, tl.sum(pp, axis=1), mask=exists)
    tl.store(sums + 3 * rows + row, tl.sum(pu, axis=1), mask=exists)


@triton.jit
def cosine(pg, gg, pp, eps):
    """|cos(g, p)|, of sums."""
    return tl.abs(pg) / ((tl.sqrt(gg) + eps) * (tl.sqrt(pp) + eps))


@triton.jit
def multiple_of_p(pu, pp, eps):
    """How many p there are in u, of sums."""
    norm = tl.sqrt(pp) + eps
    return pu / (norm * norm)


@triton.jit
def adamp_decisions(
    sums,
    first_rows,
    row_limit,
    whole_limit,
    multiples,
    projected,
    rows: tl.int64,
    eps: tl.float64,
    BLOCK: tl.constexpr,
):
    """For each row how many p are taken out of u; for each parameter, counted from 1, whether any are."""
    index = tl.program_id(0) + 1
    eps64 = number(eps, tl.float64)
    first, last = tl.load(first_rows + index - 1), tl.load(first_rows + index)
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
    of_whole = tl.where(by_whole, multiple_of_p(tl.sum(pu, axis=0), whole_pp, eps64), 0.0)
    tl.store(projected + index, tl.where(by_row, 1.0, tl.where(by_whole, 1.0, 0.0)).to(projected.dtype.element_ty))
    for begin in range(first, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        inside = offsets < last
        row_pp = tl.load(sums + 2 * rows + offsets, mask=inside, other=0.0)
        row_pu = tl.load(sums + 3 * rows + offsets, mask=inside, other=0.0)
        multiple = tl.where(by_row, multiple_of_p(row_pu, row_pp, eps64), of_whole)
        tl.store(multiples + offsets, multiple.to(multiples.dtype.element_ty), mask=inside)


@triton.jit
def adamp_step(
    param,
    model_param,
    direction,
    numbers,
    encoding,
    multiples,
    projected,
    begins,
    ends,
    chunk_rows,
    count: tl.float64,
    step_size: tl.float64,
    kept: tl.float64,
    kept_if_projected: tl.float64,
    DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """New p: p · kept − step_size · (u − multiple · p)."""
    offsets, mask, inside = chunk_offsets(begins, ends, ALIGNED, BLOCK)
    mask = unless_overflowed(numbers, mask)
    place = find_place(encoding, numbers, count)
    chunk = chunk_rows + tl.program_id(0).to(tl.int64) * _CHUNK_COLUMNS
    row, into, length = tl.load(chunk), tl.load(chunk + 1).to(tl.float32), tl.load(chunk + 2).to(tl.float32)
    # Exact for such small numbers, and much less work than a division of integers.
    per_length = divide(number(1.0, tl.float32), length)
    later = ((tl.arange(0, BLOCK).to(tl.float32) + into + 0.5) * per_length).to(tl.int32)
    multiple = tl.load(multiples + (row + later), mask=inside, other=0.0)
    if_projected = chosen(numbers, KEPT_IF_PROJECTED, kept_if_projected, DTYPE)
    is_projected = tl.load(projected + tl.load(chunk + 3)) > 0.0
    p = load_param(param, encoding, offsets, mask, DTYPE)
    u = tl.load(direction + offsets, mask=mask, other=0.0)
    u = u - multiple * p
    p = p * tl.where(is_projected, if_projected, chosen(numbers, KEPT, kept, DTYPE))
    p = p - chosen(numbers, STEP_SIZE, step_size, DTYPE) * u
    store_param(param, model_param, encoding, place, offsets, p, mask, STOCHASTIC, BLOCK)
