# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``exponent_census``: how many elements of tensors have each binary exponent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from apex_npu._extension import extension

Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

# The columns of a census: those between ``FIRST`` and ``NONFINITE`` are the exponents from -126 on.
ZERO, FIRST, NONFINITE = 0, 1, 255
BIAS = 127
# A device's gradients come to the host in pieces of 64 MiB, and are counted in such as stay in the cache.
_ELEMENTS_COPIED = 2**24
_ELEMENTS_COUNTED = 2**18


def exponent_census(tensors: Sequence[Tensor], factor: float = 1.0) -> Counts:
    """Count the binary exponents of the elements of ``tensors``, times ``factor``, as float32.

    Element x is counted in column ``127 + floor(log2 |x|)``, subnormal numbers of float32 in column 1; zeros in column
    0, inf and nan in column 255. Waits for the device.

    Args:
        tensors: Strided, real, of any floating dtype.
        factor: A number that scales them.

    Returns:
        int64, (len(tensors), 256).
    """
    counts: Counts = np.zeros((len(tensors), 256), dtype=np.int64)
    for i, part in _parts_on_host(tensors):
        if extension is None:
            counts[i] += _counted(part, factor)
        else:
            counts[i] += extension.count_exponents_cpu(part, factor).numpy()
    return counts


def _counted(part: Tensor, factor: float) -> Counts:
    counts: Counts = np.zeros(256, dtype=np.int64)
    for some in (part if factor == 1.0 else part * factor).split(_ELEMENTS_COUNTED):
        array = some.numpy()
        found = np.bincount((array.view(np.uint32) >> 23).astype(np.uint8), minlength=256)
        zeros = array.size - np.count_nonzero(array)
        found[FIRST] += found[ZERO] - zeros
        found[ZERO] = zeros
        counts += found
    return counts


def _parts_on_host(tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Parts of ``tensors`` in float32, each with the tensor's index."""
    waiting: list[tuple[int, Tensor]] = []
    for i, tensor in enumerate(tensors):
        for part in tensor.detach().reshape(-1).split(_ELEMENTS_COPIED):
            if waiting and _must_go(waiting, part):
                yield from _copied(waiting)
                waiting = []
            waiting.append((i, part))
    yield from _copied(waiting)


def _must_go(waiting: Sequence[tuple[int, Tensor]], part: Tensor) -> bool:
    total = part.numel() + sum(other.numel() for _, other in waiting)
    device = waiting[0][1].device
    return device.type == "cpu" or device != part.device or total > _ELEMENTS_COPIED


def _copied(waiting: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """One copy for parts of a device."""
    if not waiting:
        return
    floats = [part.float() for _, part in waiting]
    host = (floats[0] if len(floats) == 1 else torch.cat(floats)).cpu().contiguous()
    begin = 0
    for i, part in waiting:
        yield i, host[begin : begin + part.numel()]
        begin += part.numel()
