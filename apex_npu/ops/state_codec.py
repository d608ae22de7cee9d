# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Formats that store optimizer state in fewer bytes than float32, in plain torch.

This module defines the formats. It runs on every device without kernels of its own;
``csrc/fused_optim/state_codec.h`` gives the same bits on the CPU. Elements are counted within their parameter, in the
order of memory.

bfloat16
    Rounded stochastically: ``(bits + r) >> 16`` with 16 random bits ``r``. Rounded to nearest, a second moment would
    stop changing: with β₂ = 0.999 an update is less than half of its last bit.
int8, uint8
    Codes in blocks of 128 elements of one parameter. Each block has a float32 scale, its largest magnitude. A signed
    code c stands for c / 127 · scale. An unsigned code, for states that are never negative, stands for
    (c / 255)² · scale; it is 0 only for the value 0, because a step divides by its root. Both are rounded
    stochastically in the code. A block with inf or nan is decoded as nan throughout. A block without a magnitude of at
    least 2⁻⁹⁰ is decoded as zeros.
remainder
    The difference of a 16-bit parameter from a float32 master, int16. A bfloat16 parameter is the upper half of its
    master: ``master = (parameter << 16) + remainder``. This is exact if the parameter is rounded to nearest with halves
    away from zero. For float16, ``master = parameter + remainder · ulp(parameter) · 2⁻¹⁵``, where ulp is the distance
    to the next larger magnitude, and 2⁻²⁴ for subnormal numbers. This is exact for magnitudes of at least 2⁻¹⁶; below,
    the error is at most 2⁻³⁹.
remainder of 8 bits
    The same in int8, which stands for 256 times its value. The remainder r is rounded stochastically: ``(r + b) >> 8``
    with 8 random bits ``b``. A result that is half the distance to another parameter, to which this tie is rounded,
    moves the parameter there. A master is therefore a number with 8 more bits than a bfloat16 parameter, or with 7 more
    than a float16 parameter, and it is right on average.

Random bits come from Philox4x32-10 with a fixed key. The counter consists of ``element // 64``, the pair that a state
belongs to, the step, and the position of the parameter in the optimizer. One word serves 16 elements; the k-th of them
adds k · 0x9e3779b9. The first state of a pair takes the lower 16 bits, the second the upper. Remainders take the upper
8 bits of the pair of parameters. The bits therefore depend on neither threads, device nor layout, and a resumed run
continues with the same bits.

For every value that these encoders return, ``encode(decode(x)) == x`` for all random bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

SCALE_NUMEL = 128
# The pair of the random bits for parameters.
PARAM_PAIR = 255

KEY = (0x243F6A88, 0x85A308D3)
WEYL = 0x9E3779B9
_WORD = 0xFFFFFFFF
LEAST_SCALE = 2.0**-90
# Larger scales have a denormal reciprocal.
LARGE_SCALE = 2.0**125
_CHUNK_NUMEL = 1 << 16
# Intermediate values take about 60 bytes for each element.
_CHUNK_NUMEL_ACCELERATOR = 1 << 22


class Segment(NamedTuple):
    """One parameter in flat buffers.

    Attributes:
        begin: The number of elements before it.
        numel: The number of its elements.
        position: Its number among all parameters of the optimizer.
        first_scale: The index of its first scale among the scales of all parameters.
    """

    begin: int
    numel: int
    position: int
    first_scale: int


def scale_count(numel: int) -> int:
    """Return the number of blocks of ``numel`` elements of a parameter."""
    return -(-numel // SCALE_NUMEL)


class Piece:
    """A range of flat buffers, with the parameter of each element.

    Attributes:
        span: The range. It begins and ends at ends of blocks of 128 elements, or between parameters.
        scale_span: The range of the scales of all elements.
    """

    def __init__(self, parts: Sequence[tuple[Segment, int, int]], begin: int, end: int, device: torch.device) -> None:
        """Set ``parts``: segments, each with its first element in [begin, end) and its number of elements there."""
        self.span = slice(begin, end)
        self.scale_span = slice(
            min(segment.first_scale + first // SCALE_NUMEL for segment, first, _ in parts),
            max(segment.first_scale + scale_count(first + count) for segment, first, count in parts),
        )
        self._device = device
        self._random: tuple[int, int | Tensor, Tensor] | None = None
        self._counters = [-(-(first + count) // 64) - first // 64 for _, first, count in parts]
        columns = [
            [segment.begin + first - begin for segment, first, _ in parts],
            [count for _, _, count in parts],
            [first for _, first, _ in parts],
            [segment.position for segment, _, _ in parts],
            [segment.first_scale for segment, _, _ in parts],
            self._counters,
        ]
        self._table = torch.tensor(columns, dtype=torch.int64, device=device)

    @cached_property
    def _elements(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each element: the index of its part, its number in its parameter, and whether it is not padding."""
        begins, counts, firsts, *_ = self._table
        flat = torch.arange(self.span.stop - self.span.start, device=self._device)
        part = torch.bucketize(flat, begins, right=True).sub_(1).clamp_(min=0)
        inside = flat - begins[part]
        return part, firsts[part] + inside, (inside >= 0) & (inside < counts[part])

    @cached_property
    def is_element(self) -> Tensor:
        """False for padding."""
        return self._elements[2]

    @cached_property
    def scale_index(self) -> Tensor:
        """The index of the scale of each element; for padding, any index."""
        part, number, valid = self._elements
        return self._table[4][part] + torch.where(valid, number, self._table[2][part]) // SCALE_NUMEL

    @cached_property
    def block_elements(self) -> Tensor:
        """The elements of the block of each scale, of shape [scales, 128]; a shorter block repeats its last element."""
        begins, counts, firsts, _, first_scales, _ = self._table
        first_scales = first_scales + firsts // SCALE_NUMEL
        scale = torch.arange(self.scale_span.start, self.scale_span.stop, device=self._device)
        part = torch.bucketize(scale, first_scales, right=True).sub_(1)
        first = (scale - first_scales[part]) * SCALE_NUMEL
        inside = first.unsqueeze(1) + torch.arange(SCALE_NUMEL, device=self._device)
        last = counts[part].unsqueeze(1).sub_(1)
        found: Tensor = begins[part].unsqueeze(1) + torch.minimum(inside, last)
        return found

    def random(self, pair: int, count: int | Tensor) -> Tensor:
        """Return 32 random bits for each element, int64; the last result is kept, because two states share it."""
        if self._random is None or self._random[0] != pair or self._random[1] is not count:
            self._random = pair, count, self._make_random(pair, count)
        return self._random[2]

    def _make_random(self, pair: int, count: int | Tensor) -> Tensor:
        _, _, firsts, positions, _, counters = self._table
        total = sum(self._counters)
        flat, ends = torch.arange(total, device=self._device), counters.cumsum(0)
        part = torch.bucketize(flat, ends, right=True)  # repeat_interleave waits on some devices
        before = ends - counters
        number = flat - before[part] + firsts[part] // 64
        steps = (torch.zeros_like(number) + count).to(torch.int64)
        words = philox([number, (_shifted(number, 32) << 8) | pair, steps, positions[part]], KEY)
        part, element, _ = self._elements
        counter = (before[part] + element // 64 - firsts[part] // 64).clamp_(0, max(total - 1, 0))
        word = words.reshape(-1)[counter * 4 + element // 16 % 4]
        return (word + element % 16 * WEYL) & _WORD


def pieces(segments: Sequence[Segment], numel: int, device: torch.device) -> Iterator[Piece]:
    """Cut flat buffers of ``numel`` elements, which hold ``segments``, into pieces; yield these."""
    limit = _CHUNK_NUMEL if device.type == "cpu" else _CHUNK_NUMEL_ACCELERATOR
    parts: list[tuple[Segment, int, int]] = []
    begin = 0
    for segment in segments:
        first = 0
        while first < segment.numel:
            room = (limit - (segment.begin + first - begin)) // SCALE_NUMEL * SCALE_NUMEL
            count = segment.numel - first
            if count > room:
                count = max(room, 0)
            if count:
                parts.append((segment, first, count))
                first += count
            if first < segment.numel:
                end = segment.begin + first
                if parts:
                    yield Piece(parts, begin, end, device)
                parts, begin = [], end
    if parts:
        yield Piece(parts, begin, numel, device)


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> Tensor:
    """Return the four words of Philox4x32-10, each int64, for each counter of four words.

    Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405.
    """
    c0, c1, c2, c3 = (word & _WORD for word in counter)
    for _ in range(10):
        a_low, a_high = _multiply(c0, 0xD2511F53)
        b_low, b_high = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = b_high ^ c1 ^ key[0], b_low, a_high ^ c3 ^ key[1], a_low
        key = (key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD
    return torch.stack([c0, c1, c2, c3], dim=1)


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper word of a product of two words; int64 wraps around but keeps the bits."""
    low, high = (x & 0xFFFF) * factor, _shifted(x, 16) * factor
    middle = _shifted(low, 16) + (high & 0xFFFF)
    return ((middle & 0xFFFF) << 16) | (low & 0xFFFF), _shifted(high, 16) + _shifted(middle, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return ``x >> bits``. torch_npu would copy ``bits`` from the host, but passes a divisor as an argument."""
    return x // 2**bits if x.device.type == "npu" else x >> bits


def half_of(random: Tensor, index: int) -> Tensor:
    """Return the 16 bits of ``random`` that belong to the state ``index`` of a rule."""
    return _shifted(random, 16) & 0xFFFF if index % 2 else random & 0xFFFF


def decode(stored: Tensor, scales: Tensor | None, piece: Piece) -> Tensor:
    """Return the float32 values of ``stored``, a piece of a state; padding is 0.

    Args:
        stored: bfloat16, int8 or uint8.
        scales: The scales of all parameters; None for bfloat16.
        piece: The positions of its elements.
    """
    if scales is None:
        return stored.to(torch.float32)
    code = stored.to(torch.float32)
    code = code * (1 / 127) if stored.dtype == torch.int8 else code * code * (1 / 65025)
    return torch.where(piece.is_element, code * scales[piece.scale_index], 0.0)


def encode(values: Tensor, stored: Tensor, scales: Tensor | None, piece: Piece, half: Tensor) -> None:
    """Write float32 ``values`` to ``stored``, and their scales; ``half`` has 16 random bits for each value."""
    if scales is None:
        stored.copy_(round_stochastically(values, half))
        return
    values = torch.where(piece.is_element, values, 0.0)
    index, span = piece.scale_index, piece.scale_span
    largest = (values.view(torch.int32) & 0x7FFFFFFF)[piece.block_elements].amax(dim=1)
    scale = largest.view(torch.float32)
    scale = torch.where(scale < LEAST_SCALE, 0.0, scale)
    scale = torch.where(largest >= 0x7F800000, float("nan"), scale)
    scales[span] = scale
    down = torch.where(scale > LARGE_SCALE, 2.0**-4, 1.0)
    inverse = torch.where(scale > 0, 1.0 / (scale * down), 0.0)
    index = index - span.start
    values = values * down[index]
    ratio = values * inverse[index]
    kept = scale[index] > 0  # neither 0 nor nan
    one_and_more = 1 + (_shifted(half, 4).to(torch.float32) + 0.5) * 2.0**-12  # exact
    if stored.dtype == torch.int8:
        code = (torch.where(kept, ratio * 127.0, 0.0) + 127.0 + one_and_more).to(torch.int32) - 128
    else:
        root = _root(torch.where(kept, ratio, 0.0).clamp_(min=0.0)) * 255.0
        code = (root + one_and_more).to(torch.int32) - 1
        code = torch.maximum(code, (values > 0).to(torch.int32))
    stored.copy_(torch.where(kept, code, 0))


def _root(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.sqrt()
    return values.to(torch.float64).sqrt_().to(torch.float32)  # torch's in float32 may be wrong in the last bit


def round_stochastically(values: Tensor, half: Tensor) -> Tensor:
    """Round float32 ``values`` to bfloat16 with 16 random bits for each; nan stays nan."""
    bits = values.view(torch.int32)
    rounded = (bits.to(torch.int64) & _WORD) + half
    words = torch.where(values.isnan(), (bits.to(torch.int64) & _WORD) | 0x00400000, rounded)
    return _as_bfloat16(_shifted(words, 16))


def decode_remainder(param: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 masters of bfloat16 or float16 parameters.

    If a script has written to a parameter, its old remainder must not change its value. In float16, remainders that
    would round to another number are clamped. In bfloat16, remainders that would change a nan, inf or 0 are ignored.
    """
    if remainder.dtype == torch.int8:
        remainder = _widened(param, remainder)
    if param.dtype == torch.float16:
        return _decode_half(param, remainder)
    upper = param.view(torch.int16).to(torch.int64) & 0xFFFF
    magnitude, lower = upper & 0x7FFF, remainder.to(torch.int64)
    stale = (magnitude > 0x7F80) | ((magnitude == 0) & (lower < 0)) | ((magnitude == 0x7F80) & (lower > 0))
    return _as_float32((upper << 16) + torch.where(stale, 0, lower))


def encode_remainder(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round ``values`` to ``dtype``, bfloat16 or float16; return them and int16 remainders. A nan becomes quiet."""
    if dtype == torch.float16:
        return _encode_half(values)
    bits = values.contiguous().view(torch.int32).to(torch.int64) & _WORD
    kept = torch.where(values.isnan(), (bits | 0x00400000) & 0xFFFF0000, bits)
    lower = kept & 0xFFFF
    return _as_bfloat16(_shifted(kept + 0x8000, 16)), (lower - (_shifted(lower, 15) << 16)).to(torch.int16)


def _widened(param: Tensor, remainder: Tensor) -> Tensor:
    """Return int8 remainders in 16 bits, clamped to those that ``narrow_remainder`` returns for float16 parameters."""
    wide = remainder.to(torch.int16)
    if param.dtype == torch.float16:
        largest = 64 - (param.contiguous().view(torch.int16) & 1)
        wide = torch.minimum(torch.maximum(wide, -largest), largest)
    return wide * 256


def narrow_remainder(param: Tensor, remainder: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Round what ``encode_remainder`` has returned to 8 bits, by the upper 8 of 32 random bits for each element.

    Returns:
        The parameters, some of which are moved to the next number, and int8 remainders.
    """
    rounded = _shifted(remainder.to(torch.int32) + _shifted(random, 24).to(torch.int32), 8)
    bits = param.contiguous().view(torch.int16).to(torch.int32)
    if param.dtype == torch.bfloat16:
        step = (rounded == 128).to(torch.int32)  # away from zero
        return (bits + step).to(torch.int16).view(param.dtype), torch.where(rounded == 128, -128, rounded).to(
            torch.int8
        )
    moves = (bits % 2 == 1) & (rounded.abs() == 64)
    outward = (rounded < 0) == (bits < 0)
    bits = bits + torch.where(moves, torch.where(outward, 1, -1), 0)
    magnitude = bits & 0x7FFF
    to_power = moves & outward & (magnitude % 1024 == 0) & (magnitude > 1024)  # whose units are twice as large
    rounded = torch.where(moves, -rounded, rounded)
    rounded = torch.where(to_power, rounded.sign() * 32, rounded)
    return bits.to(torch.int16).view(param.dtype), torch.where(magnitude < 0x7C00, rounded, 0).to(torch.int8)


def _decode_half(param: Tensor, remainder: Tensor) -> Tensor:
    magnitude, exponent = _half_magnitude(param)
    outward = _largest_remainder(magnitude)
    inward = torch.where((magnitude % 1024 == 0) & (magnitude > 1024), 1 << 13, outward)
    negative, units = param.signbit(), remainder.to(torch.int32)
    away = torch.minimum(torch.maximum(torch.where(negative, -units, units), -inward), outward)
    away = torch.where(magnitude < 0x7C00, away, 0)  # inf and nan have no remainder
    master = param.abs().to(torch.float32) + away.to(torch.float32) * _power_of_two(exponent - 40)
    return torch.where(negative, -master, master)


def _encode_half(values: Tensor) -> tuple[Tensor, Tensor]:
    param = values.to(torch.float16)
    magnitude, exponent = _half_magnitude(param)
    remainder = ((values - param.to(torch.float32)) * _power_of_two(40 - exponent)).round()
    largest = _largest_remainder(magnitude).to(torch.float32)
    remainder = torch.minimum(torch.maximum(remainder, -largest), largest)
    return param, torch.where(magnitude < 0x7C00, remainder, 0.0).to(torch.int16)


def _largest_remainder(magnitude: Tensor) -> Tensor:
    """Return the largest remainder that rounds back: half of the last bit for even numbers, which win a tie.

    For odd numbers, it is the next float32 below that. Toward zero from a power of two, the limit is half of it.
    """
    odd = magnitude % 2
    return (1 << 14) - odd - odd * (magnitude >= 0x200) - 2 * odd * (magnitude >= 0x400)


def _half_magnitude(param: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of float16 ``param`` without the sign, and the biased exponent, 1 for subnormal numbers."""
    magnitude = param.contiguous().view(torch.int16).to(torch.int32) & 0x7FFF
    return magnitude, (magnitude // 1024).clamp_(min=1)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float32, for normal numbers."""
    return ((exponent + 127) * (1 << 23)).to(torch.int32).view(torch.float32)


def _as_bfloat16(words: Tensor) -> Tensor:
    words = words & 0xFFFF
    return (words - (_shifted(words, 15) << 16)).to(torch.int16).view(torch.bfloat16)


def _as_float32(words: Tensor) -> Tensor:
    words = words & _WORD
    return (words - (_shifted(words, 31) << 32)).to(torch.int32).view(torch.float32)
