# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parts of the reference kernels, the bodies of the declared ops: plain torch on chunks of buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
