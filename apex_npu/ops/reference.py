# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parts of the reference kernels, the bodies of the declared ops: plain torch on chunks of buffers, and on segments.

For segments the number of torch calls does not depend on their number, and nothing waits for the device. Sums are
scattered by a map from elements to segments, in which padding is the last segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
# The dtypes that can be stepped and gathered.
FLOATS = LOW_PRECISION | {torch.float32, torch.float64}

# Large enough to hide Python's overhead, small enough that a chunk of every operand stays in a core's cache. An
# accelerator has no such cache but a cost of each launch, hence a larger chunk.
_CHUNK_NUMEL = 1 << 16
_CHUNK_NUMEL_ACCELERATOR = 1 << 26
# The length of sums in float32; in longer sums, small addends would all be rounded the same way.
_ROW_NUMEL = 1 << 10
# The limit of partial sums of a segment; in a single float32 sum, the millionth element would hardly count.
_MAX_LANES = 1 << 14


# The operands are tensors or None. They are typed Any, because each is returned with its own type.
def chunks(tensors: tuple[Tensor | None, ...], numel: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Yield the operands, of one length, in pieces of ``numel`` elements; by default of ``chunk_numel``."""
    first = tensors[0]
    assert first is not None
    step = numel or chunk_numel(first.device)
    if 0 < first.numel() <= step:
        yield tensors
    elif first.numel():
        yield from zip(*(repeat(None) if t is None else t.split(step) for t in tensors), strict=False)


def chunk_numel(device: torch.device) -> int:
    """Return the number of elements to process in a call; a power of two."""
    return _CHUNK_NUMEL if device.type == "cpu" else _CHUNK_NUMEL_ACCELERATOR


def in_dtype(grad: Tensor, dtype: torch.dtype, maximize: bool, grad_scale: Tensor | None) -> Tensor:
    """Return the gradient that a rule steps by, in ``dtype``: ±grad / grad_scale."""
    # A scale with a dimension makes the division widen; in float16, small gradients would be lost.
    wide = grad.to(dtype) if grad_scale is None else grad / grad_scale.to(dtype).reshape(1)
    return wide.neg() if maximize else wide


def is_wide_or_narrow(grad: Tensor, param: Tensor) -> bool:
    """Return whether ``grad`` has the dtype of ``param``, or 16 bits for a float32 ``param``."""
    return grad.dtype == param.dtype or (param.dtype == torch.float32 and grad.dtype in LOW_PRECISION)


def write_back(param: Tensor, value: Tensor) -> None:
    """Round ``value`` into ``param``, unless they are the same tensor."""
    if value is not param:
        param.copy_(value)


def add_(to: Tensor, addend: Tensor, factor: float | Tensor) -> None:
    """Add ``factor`` times ``addend`` to ``to``."""
    if isinstance(factor, Tensor):
        to.addcmul_(addend, factor.to(to.dtype))
    else:
        to.add_(addend, alpha=factor)


def subtract_quotient_(to: Tensor, numerator: Tensor, denominator: Tensor, factor: float | Tensor) -> None:
    """Subtract ``factor`` times a quotient from ``to``; ``denominator`` is overwritten."""
    if isinstance(factor, Tensor):
        to.sub_(torch.div(numerator, denominator, out=denominator).mul_(factor))
    else:
        to.addcdiv_(numerator, denominator, value=-factor)


def bias_correction_of(beta: float, step: int | Tensor) -> float | Tensor:
    """Return 1 − beta^step. On a device it uses expm1: in float32, the power is too inexact in the first steps."""
    if isinstance(step, Tensor):
        return torch.expm1(step.to(torch.float32) * (math.log(beta) if beta else -math.inf)).neg_()
    return 1 - beta**step


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states and of updates for tensors of ``dtype``: float32 for low-precision dtypes."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def sum_of_squares(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of squares: of each row in ``dtype``, and of all rows in float64."""
    # An operand that has the dtype is not cut into chunks, because only the norms of its rows are written.
    wide = [x] if x.dtype == dtype else (chunk.to(dtype) for (chunk,) in chunks((x,)))
    norms = []
    for part in wide:
        even = part.numel() // _ROW_NUMEL * _ROW_NUMEL
        norms += [torch.linalg.vector_norm(part[:even].view(-1, _ROW_NUMEL), dim=1), part[even:].norm().view(1)]
    return torch.cat(norms or [x]).double().square_().sum()


def segment_ids(starts: Tensor, lengths: Tensor, numel: int, device: torch.device) -> Tensor:
    """Return the index of the segment of each of ``numel`` elements, int64; ``len(starts)`` outside all segments.

    The result is padded with ``len(starts) + 1`` up to a multiple of ``lanes_of``.
    """
    count = starts.numel()
    lanes = lanes_of(numel, count, device)
    ids = torch.full((-(-numel // lanes) * lanes,), count, dtype=torch.int64, device="cpu")
    ids[numel:] = count + 1
    # For every covered element, in the order of segments: its position and the index of its segment.
    owner = torch.repeat_interleave(torch.arange(count, device="cpu"), lengths)
    before = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = torch.arange(owner.numel(), device="cpu") - before + torch.repeat_interleave(starts, lengths)
    ids[positions] = owner
    return ids.to(device)


def lanes_of(numel: int, count: int, device: torch.device) -> int:
    """Return the number of partial sums of a segment: a power of two, so that all of them are less than the buffer.

    If they are of float64 (see ``segment_sums``), all of them are less than a chunk.
    """
    together = numel // 4 if device.type == "npu" else min(numel // 4, _MAX_LANES)
    lanes = max(1, min(_MAX_LANES, together // (count + 2)))
    return 1 << (lanes.bit_length() - 1)


def segment_sums(pairs: Sequence[tuple[Tensor, Tensor]], ids: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return for each of ``pairs`` a row of ``dtype``: the sums of a · b over each of ``count`` segments.

    The sum over the padding and an arbitrary number follow.
    """
    first = pairs[0][0]
    numel, lanes = first.numel(), lanes_of(first.numel(), count, first.device)
    # An NPU has no usable float64. Elsewhere it costs little, and long sums need it.
    wide = dtype if first.device.type == "npu" else torch.float64
    partial = first.new_zeros(len(pairs), count + 2, lanes, dtype=wide)
    step = max(lanes, chunk_numel(first.device) // len(pairs) // lanes * lanes)
    for begin in range(0, numel, step):
        end = min(begin + step, numel)
        owner = ids[begin : begin + step]
        products = first.new_empty(len(pairs), owner.numel(), dtype=wide)
        for product, (a, b) in zip(products, pairs, strict=True):
            torch.mul(a[begin:end].to(wide), b[begin:end].to(wide), out=product[: end - begin])
        owner = owner.view(1, -1, lanes).expand(len(pairs), -1, -1)
        partial.scatter_add_(1, owner, products.view(len(pairs), -1, lanes))
    return partial.sum(2).to(dtype)


def update_moments_(
    direction: Tensor,
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    beta1: float,
    beta2: float,
    beta3: float,
    eps: float | Tensor,
    step: int | Tensor,
    correct_first: bool,
    correct_second: bool,
    l2: float = 0.0,
    decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool,
    grad_scale: Tensor | None,
) -> None:
    """Update Adam's moments, and write m / sqrt(v) + ``decay`` · param to ``direction``."""
    dtype = exp_avg.dtype
    correction1 = bias_correction_of(beta1, step) if correct_first else None
    root_correction2 = bias_correction_of(beta2, step) ** 0.5 if correct_second else None
    for u, p, g_chunk, m, v in chunks((direction, param, grad, exp_avg, exp_avg_sq)):
        g = in_dtype(g_chunk, dtype, maximize, grad_scale)
        if l2:
            g = g.add(p.to(dtype), alpha=l2)
        if beta3 == 1 - beta1:
            m.lerp_(g, beta3)
        else:
            m.mul_(beta1).add_(g, alpha=beta3)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denom = v.sqrt()
        if root_correction2 is not None:
            denom.div_(root_correction2)
        numerator = m.mul(beta1).add_(g, alpha=beta3) if nesterov else m
        torch.div(numerator, denom.add_(eps), out=u)
        if correction1 is not None:
            u.div_(correction1)
        if decay:
            u.add_(p.to(dtype), alpha=decay)


def add_product_(to: Tensor, a: Tensor, b: Tensor, factor: float | Tensor) -> None:
    """Add ``factor`` times ``a`` · ``b`` to ``to``."""
    if isinstance(factor, Tensor):
        to.add_(a.mul(b).mul_(factor))
    else:
        to.addcmul_(a, b, value=factor)


def trust_ratio(squares: Tensor, max_weight_norm: float) -> Tensor:
    """Return LAMB's r for each segment, from the squared norms of parameters and directions; overwrites ``squares``."""
    norms = squares.sqrt_()
    unusable = (norms == 0).any(0)  # nan stays nan, so that an overflow shows
    return norms[0].clamp_max_(max_weight_norm).div_(norms[1]).masked_fill_(unusable, 1.0)
