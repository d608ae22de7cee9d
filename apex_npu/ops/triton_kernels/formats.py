# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loads and stores operands, including those that are stored in fewer bytes than float32.

``ops/state_codec.py`` defines these formats, and the functions here give the same bits. Without an ``Encoding``, they
load and store plain numbers. With one, each program has a chunk of one parameter, described by its *place*. Chunks
begin at blocks of 128 elements, so that one program has a whole block, its scale and its random bits. Gradients that
stay in place are also found by the chunks of parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from apex_npu.ops import state_codec
from apex_npu.ops.triton_kernels.arithmetic import GO, block_offsets, divide, number, root, unless_overflowed
from apex_npu.ops.triton_kernels.chunks import ROW_COLUMNS
from apex_npu.ops.triton_kernels.gather import load_listed
from apex_npu.ops.triton_kernels.sums import range_offsets

_COLUMNS = tl.constexpr(5)  # columns of Encoding.places
_ROW_COLUMNS = tl.constexpr(ROW_COLUMNS)
_KEY = tl.constexpr(state_codec.KEY[1] << 32 | state_codec.KEY[0])
_WEYL = tl.constexpr(state_codec.WEYL)
_PARAM_PAIR = tl.constexpr(state_codec.PARAM_PAIR)
_SCALE_NUMEL = tl.constexpr(state_codec.SCALE_NUMEL)
_LEAST_SCALE = tl.constexpr(state_codec.LEAST_SCALE)
_LARGE_SCALE = tl.constexpr(state_codec.LARGE_SCALE)
_INF = tl.constexpr(0x7F800000)
_QUIET = tl.constexpr(0x00400000)


class Encoding(NamedTuple):
    """Additional arguments of a kernel if operands are encoded, or gradients are listed; else all are None.

    Attributes:
        places: int64, a row for each chunk: its first element in the buffers, and the element after its last; the
            number of the first element in its parameter; the position of the parameter in the optimizer; the index of
            the chunk's first scale.
        step: The number of the step, if only the device knows it; else None, and the number is an argument.
        remainder: The remainders of bfloat16 or float16 parameters, int16 or int8; None without remainders.
        scales: The scales of each state of the rule; None for a state without 8 bits.
        rows: ``Chunks.rows``, if gradients are listed.
        addresses: int64: ``on_device`` of ``grad_lists.Addresses``.
        wide: The memory of ``addresses`` viewed as the gradients' dtype, for its type.
        narrow: The memory of ``addresses`` viewed as the narrow gradients' dtype; None without narrow gradients.
    """

    places: Any = None
    step: Any = None
    remainder: Any = None
    scales: Any = None
    rows: Any = None
    addresses: Any = None
    wide: Any = None
    narrow: Any = None


class _Place(NamedTuple):
    """The chunk of a program; ``left``: the number of its elements, or 0 to write nothing."""

    left: Any
    first: Any
    position: Any
    scale: Any
    step: Any


@triton.jit
def find_place(encoding, numbers, count):
    """Return this program's chunk; all zeros if nothing is encoded."""
    if encoding.places is None:
        return _Place(0, 0, 0, 0, 0)
    else:
        row = encoding.places + tl.program_id(0).to(tl.int64) * _COLUMNS
        left = tl.load(row + 1) - tl.load(row)
        if numbers is not None:
            left = tl.where(tl.load(numbers + GO) != 0, left, 0)
        step = number(count, tl.float64) if encoding.step is None else tl.load(encoding.step).to(tl.float64)
        return _Place(left, tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), step.to(tl.int64))


@triton.jit
def element_offsets(encoding, numbers, numel, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of an elementwise program's elements, and a mask of those to load and store."""
    if encoding.places is None and encoding.rows is None:
        offsets = block_offsets(BLOCK)
        return offsets, unless_overflowed(numbers, offsets < numel)
    else:
        program = tl.program_id(0).to(tl.int64)
        if encoding.places is None:
            row = encoding.rows + program * _ROW_COLUMNS
        else:
            row = encoding.places + program * _COLUMNS
        offsets, mask, _ = range_offsets(row, row + 1, ALIGNED, BLOCK)
        return offsets, unless_overflowed(numbers, mask)


# Gradients and parameters


@triton.jit
def load_decayed(
    param,
    grad,
    grad_scale,
    encoding,
    offsets,
    mask,
    weight_decay,
    L2: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return p and ±g / grad_scale. ``weight_decay``: with L2, p's share in g; with DECOUPLED, the factor of p."""
    p = load_param(param, encoding, offsets, mask, DTYPE)
    # Widened first, because float16 would lose small values.
    if encoding.rows is None:
        g = tl.load(grad + offsets, mask=mask, other=0.0).to(DTYPE)
    else:
        g = load_listed(encoding, ALIGNED, BLOCK, DTYPE, tl.program_id(0).to(tl.int64))
    if grad_scale is not None:
        g = g * divide(number(1.0, DTYPE), tl.load(grad_scale).to(DTYPE))
    if MAXIMIZE:
        g = -g
    if DECOUPLED:
        p = p * weight_decay
    if L2:
        g = g + weight_decay * p
    return p, g


@triton.jit
def load_param(param, encoding, offsets, mask, DTYPE: tl.constexpr):
    """Load the parameters, or their masters if there are remainders."""
    p = tl.load(param + offsets, mask=mask, other=0.0)
    if encoding.remainder is None:
        return p.to(DTYPE)
    else:
        remainder = tl.load(encoding.remainder + offsets, mask=mask, other=0).to(tl.int32)
        if encoding.remainder.dtype.element_ty == tl.int8:
            remainder = widened(p, remainder)
        return join(p, remainder)


@triton.jit
def join(param, remainder):
    """Return the float32 masters of bfloat16 or float16 parameters."""
    bits = param.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = bits & 0x7FFF
    if param.dtype == tl.bfloat16:
        stale = (magnitude > 0x7F80) | ((magnitude == 0) & (remainder < 0)) | ((magnitude == 0x7F80) & (remainder > 0))
        return ((bits << 16) + tl.where(stale, 0, remainder)).to(tl.float32, bitcast=True)
    else:
        outward = largest_remainder(magnitude)
        inward = tl.where(((magnitude & 0x3FF) == 0) & (magnitude > 0x400), 0x2000, outward)
        away = tl.minimum(tl.maximum(tl.where(bits < 0, -remainder, remainder), -inward), outward)
        away = tl.where(magnitude < 0x7C00, away, 0)
        unit = ((tl.maximum(magnitude >> 10, 1) + 87) << 23).to(tl.float32, bitcast=True)
        master = tl.abs(param).to(tl.float32) + away.to(tl.float32) * unit
        return tl.where(bits < 0, -master, master)


@triton.jit
def largest_remainder(magnitude):
    """Return the largest remainder of a float16 number with these bits; see ``state_codec.py``."""
    below_tie = tl.where(magnitude >= 0x400, 4, tl.where(magnitude >= 0x200, 2, 1))
    return 0x4000 - tl.where((magnitude & 1) != 0, below_tie, 0)


@triton.jit
def split(value, DTYPE: tl.constexpr):
    """Return parameters of DTYPE, bfloat16 or float16, and their remainders."""
    if tl.bfloat16 == DTYPE:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value != value, (bits | _QUIET) & 0xFFFF0000, bits)
        param = ((bits + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return param, bits.to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        param = value.to(tl.float16)
        magnitude = param.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        per_unit = ((167 - tl.maximum(magnitude >> 10, 1)) << 23).to(tl.float32, bitcast=True)
        # Adding 1.5 · 2²³ rounds to an integer, which is then in the last bits.
        rounded = ((value - param.to(tl.float32)) * per_unit + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        largest = largest_remainder(magnitude)
        rounded = tl.minimum(tl.maximum(rounded, -largest), largest)
        return param, tl.where(magnitude < 0x7C00, rounded, 0).to(tl.int16)


@triton.jit
def widened(param, remainder):
    """Return remainders of 8 bits in 16; see ``state_codec.py``."""
    if param.dtype == tl.float16:
        largest = 64 - (param.to(tl.int16, bitcast=True).to(tl.int32) & 1)
        remainder = tl.minimum(tl.maximum(remainder, -largest), largest)
    return remainder * 256


@triton.jit
def narrow(param, remainder, random):
    """Round remainders to 8 bits; see ``state_codec.narrow_remainder``."""
    rounded = (remainder.to(tl.int32) + (random >> 24).to(tl.int32)) >> 8
    bits = param.to(tl.int16, bitcast=True).to(tl.int32)
    if param.dtype == tl.bfloat16:
        moved = bits + tl.where(rounded == 128, 1, 0)
        rounded = tl.where(rounded == 128, -128, rounded)
    else:
        moves = ((bits & 1) != 0) & (tl.abs(rounded) == 64)
        outward = (rounded < 0) == (bits < 0)
        moved = bits + tl.where(moves, tl.where(outward, 1, -1), 0)
        magnitude = moved & 0x7FFF
        to_power = moves & outward & ((magnitude & 0x3FF) == 0) & (magnitude > 0x400)
        rounded = tl.where(moves, -rounded, rounded)
        rounded = tl.where(to_power, rounded >> 1, rounded)
        rounded = tl.where(magnitude < 0x7C00, rounded, 0)
    return moved.to(tl.int16).to(param.dtype, bitcast=True), rounded.to(tl.int8)


@triton.jit
def store_param(
    param,
    encoding,
    place,
    offsets,
    value,
    mask,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round ``value`` into the parameters, stochastically with STOCHASTIC, which needs bfloat16 parameters."""
    if STOCHASTIC:
        bits = random_bits(place, _PARAM_PAIR, BLOCK) & 0xFFFF
        tl.store(param + offsets, round_stochastically(value, bits), mask=mask)
    elif encoding.remainder is None:
        tl.store(param + offsets, value.to(param.dtype.element_ty), mask=mask)
    else:
        rounded, remainder = split(value, param.dtype.element_ty)
        if encoding.remainder.dtype.element_ty == tl.int8:
            rounded, remainder = narrow(rounded, remainder, random_bits(place, _PARAM_PAIR, BLOCK))
        tl.store(param + offsets, rounded, mask=mask)
        tl.store(encoding.remainder + offsets, remainder, mask=mask)


# States


@triton.jit
def load_state(state, encoding, place, INDEX: tl.constexpr, offsets, mask, BLOCK: tl.constexpr):
    """Load the values of ``state``, the INDEX-th of its rule."""
    if state.dtype.element_ty == tl.int8 or state.dtype.element_ty == tl.uint8:
        code = tl.load(state + offsets, mask=mask, other=0).to(tl.float32)
        if state.dtype.element_ty == tl.int8:
            code = code * number(1 / 127, tl.float32)
        else:
            code = code * code * number(1 / 65025, tl.float32)
        blocks = tl.arange(0, BLOCK // _SCALE_NUMEL).to(tl.int64)
        held = blocks * _SCALE_NUMEL < place.left
        scale = tl.load(encoding.scales[INDEX] + (place.scale + blocks), mask=held, other=0.0)
        return code * each_of_block(scale, BLOCK)
    else:
        values = tl.load(state + offsets, mask=mask, other=0.0)
        return values if encoding.places is None else values.to(tl.float32)


@triton.jit
def store_state(state, encoding, place, INDEX: tl.constexpr, offsets, value, mask, BLOCK: tl.constexpr):
    """Round ``value`` into ``state``, the INDEX-th of its rule."""
    if encoding.places is None or state.dtype.element_ty == tl.float32:
        tl.store(state + offsets, value, mask=mask)
    else:
        bits = random_bits(place, INDEX // 2, BLOCK)
        half = bits >> 16 if INDEX % 2 else bits & 0xFFFF
        if state.dtype.element_ty == tl.bfloat16:
            tl.store(state + offsets, round_stochastically(value, half), mask=mask)
        else:
            code, scale = encode(value, half, place.left, state.dtype.element_ty, BLOCK)
            tl.store(state + offsets, code, mask=mask)
            blocks = tl.arange(0, BLOCK // _SCALE_NUMEL).to(tl.int64)
            tl.store(encoding.scales[INDEX] + (place.scale + blocks), scale, mask=blocks * _SCALE_NUMEL < place.left)


@triton.jit
def encode(value, half, left, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Return 8-bit codes, and the scale of each block, of the first ``left`` elements; other codes are 0."""
    value = tl.where(tl.arange(0, BLOCK) < left, value, 0.0)
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.reshape(magnitude, [BLOCK // _SCALE_NUMEL, _SCALE_NUMEL]), axis=1)
    scale = largest.to(tl.float32, bitcast=True)
    scale = tl.where(scale < _LEAST_SCALE, 0.0, scale)
    scale = tl.where(largest >= _INF, float("nan"), scale)
    down = tl.where(scale > _LARGE_SCALE, 2.0**-4, 1.0)  # larger scales have a denormal reciprocal
    inverse = tl.where(scale > 0, divide(number(1.0, tl.float32), scale * down), 0.0)
    ratio = value * each_of_block(down, BLOCK) * each_of_block(inverse, BLOCK)
    kept = each_of_block(scale, BLOCK) > 0  # neither 0 nor nan
    ratio = tl.where(kept, ratio, 0.0)
    one_and_more = 1.0 + ((half >> 4).to(tl.float32) + 0.5) * 2.0**-12  # exact
    if tl.int8 == DTYPE:
        code = (ratio * 127.0 + 127.0 + one_and_more).to(tl.int32) - 128
    else:
        code = (root(tl.maximum(ratio, 0.0)) * 255.0 + one_and_more).to(tl.int32) - 1
        code = tl.maximum(code, (value * each_of_block(down, BLOCK) > 0).to(tl.int32))
    return tl.where(kept, code, 0).to(DTYPE), scale


@triton.jit
def each_of_block(x, BLOCK: tl.constexpr):
    """Return for each element the value of its block in ``x``."""
    wide = tl.broadcast_to(tl.reshape(x, [BLOCK // _SCALE_NUMEL, 1]), [BLOCK // _SCALE_NUMEL, _SCALE_NUMEL])
    return tl.reshape(wide, [BLOCK])


@triton.jit
def round_stochastically(value, half):
    """Round float32 to bfloat16 with 16 random bits for each element; nan stays nan."""
    bits = value.to(tl.uint32, bitcast=True)
    bits = tl.where(value != value, bits | _QUIET, bits + half)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def random_bits(place, PAIR: tl.constexpr, BLOCK: tl.constexpr):
    """Return 32 random bits for each element: one word serves 16 elements, and one run of Philox makes four words."""
    w0, w1, w2, w3 = random_words(place, place.first // 64 + tl.arange(0, BLOCK // 64), PAIR)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK // 16, 1])
    multiples = tl.reshape(tl.arange(0, 16).to(tl.uint32) * _WEYL, [1, 16])
    return tl.reshape(words + multiples, [BLOCK])


@triton.jit
def random_words(place, counter, PAIR: tl.constexpr):
    """Return the four words of Philox4x32-10."""
    c0 = counter.to(tl.uint32)
    c1 = ((counter >> 32 << 8) | PAIR).to(tl.uint32)
    step, position = place.step.to(tl.uint32), place.position.to(tl.uint32)
    return tl.philox(_KEY, c0, c1, tl.zeros_like(c0) + step, tl.zeros_like(c0) + position)
