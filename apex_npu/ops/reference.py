# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the reference kernels, the bodies of the declared ops, are made of: plain torch on chunks of buffers."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
# What can be stepped and gathered.
FLOATS = LOW_PRECISION | {torch.float32, torch.float64}

# Large enough to hide Python, small enough that a chunk of every operand stays in a core's cache. An accelerator has no
# such cache but a launch cost, hence larger there.
_CHUNK_NUMEL = 1 << 16
_CHUNK_NUMEL_ACCELERATOR = 1 << 26
# Of sums in float32: with many more, elements of few bits would all be rounded the same way.
_ROW_NUMEL = 1 << 10


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, Tensor] = {}


_scratch = _Scratch()


# Of operands, each a tensor or None: Any, since what is given as a tensor comes back as one.
def chunks(tensors: tuple[Tensor | None, ...], numel: int | None = None) -> Iterator[tuple[Any, ...]]:
    """The operands, of one length, piece by piece; of ``numel`` elements each, by default what ``chunk_numel`` says."""
    first = tensors[0]
    assert first is not None
    step = numel or chunk_numel(first.device)
    if 0 < first.numel() <= step:
        yield tensors
    elif first.numel():
        yield from zip(*(repeat(None) if t is None else t.split(step) for t in tensors), strict=False)


def chunk_numel(device: torch.device) -> int:
    """How many elements are worth a call; a power of two."""
    return _CHUNK_NUMEL if device.type == "cpu" else _CHUNK_NUMEL_ACCELERATOR


def scratch(numel: int, like: Tensor) -> Tensor:
    """Memory for intermediate values of a chunk, of ``like``'s dtype, on its device; valid until the next call.

    On a CPU it is kept, by each thread for itself: fresh memory would have to be fetched into the cache first.
    """
    if like.device.type != "cpu":
        return torch.empty(numel, dtype=like.dtype, device=like.device)
    kept = _scratch.by_dtype
    found = kept.get(like.dtype)
    if found is None or found.numel() < numel:
        with torch.inference_mode(False):  # where it was made it may be written everywhere
            found = kept[like.dtype] = torch.empty(numel, dtype=like.dtype, device=like.device)
    return found[:numel]


def in_dtype(grad: Tensor, dtype: torch.dtype, maximize: bool, grad_scale: Tensor | None) -> Tensor:
    """What a rule steps by, in ``dtype``: ±grad / grad_scale."""
    # A scale with a dimension widens, too: divided in float16, a small gradient would be lost.
    wide = grad.to(dtype) if grad_scale is None else grad / grad_scale.to(dtype).reshape(1)
    return wide.neg() if maximize else wide


def is_wide_or_narrow(grad: Tensor, param: Tensor) -> bool:
    """True for a gradient in the dtype of ``param``, and for one in 16 bits of a float32 one."""
    return grad.dtype == param.dtype or (param.dtype == torch.float32 and grad.dtype in LOW_PRECISION)


def write_back(param: Tensor, value: Tensor, model_param: Tensor | None) -> None:
    """Round ``value`` into ``param`` and its low-precision copy, where they are not the same."""
    if value is not param:
        param.copy_(value)
    if model_param is not None:
        model_param.copy_(value)


def add_(to: Tensor, addend: Tensor, factor: float | Tensor) -> None:
    """Add ``factor`` times ``addend`` to ``to``."""
    if isinstance(factor, Tensor):
        to.addcmul_(addend, factor.to(to.dtype))
    else:
        to.add_(addend, alpha=factor)


def subtract_quotient_(to: Tensor, numerator: Tensor, denominator: Tensor, factor: float | Tensor) -> None:
    """Subtract ``factor`` times a quotient from ``to``. ``denominator`` holds anything afterwards."""
    if isinstance(factor, Tensor):
        to.sub_(torch.div(numerator, denominator, out=denominator).mul_(factor))
    else:
        to.addcdiv_(numerator, denominator, value=-factor)


def bias_correction_of(beta: float, step: int | Tensor) -> float | Tensor:
    """1 − beta^step. On a device in its float32, in which the power would leave but five digits of the first steps'."""
    if isinstance(step, Tensor):
        return torch.expm1(step.to(torch.float32) * (math.log(beta) if beta else -math.inf)).neg_()
    return 1 - beta**step


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of ``dtype`` are updated in, and their state kept in: float32 for the low-precision ones."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def sum_of_squares(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Of all elements in float64; of each row of them in ``dtype``."""
    # What has the dtype need not be cut into chunks, since nothing but the norms of rows is written.
    wide = [x] if x.dtype == dtype else (chunk.to(dtype) for (chunk,) in chunks((x,)))
    norms = []
    for part in wide:
        even = part.numel() // _ROW_NUMEL * _ROW_NUMEL
        norms += [torch.linalg.vector_norm(part[:even].view(-1, _ROW_NUMEL), dim=1), part[even:].norm().view(1)]
    return torch.cat(norms or [x]).double().square_().sum()
