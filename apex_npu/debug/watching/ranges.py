# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Ranges``: reads the smallest and the largest elements of tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Ranges:
    """Reads the ranges of tensors into memory that it keeps."""

    def __init__(self, clear: Callable[[], None]) -> None:
        """Set ``clear``, which is called after a read that may have raised the device's overflow flag."""
        self._clear = clear
        self._slots: dict[tuple[torch.device, torch.dtype], tuple[Tensor, list[Any]]] = {}

    def of(self, tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
        """Return the smallest and the largest element of each tensor, or nan for both if it contains nan.

        This launches one kernel for each tensor, and waits once for each device and dtype.
        """
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        real = [torch.view_as_real(t.resolve_conj()) if t.dtype.is_complex else t.detach() for t in tensors]
        for i, tensor in enumerate(real):
            alike.setdefault((tensor.device, tensor.dtype), []).append(i)
        ranges = [(0.0, 0.0)] * len(real)
        for key, indices in alike.items():
            all_slots, pairs = self._slots_for(*key, len(indices))
            for i, (low, high) in zip(indices, pairs, strict=False):
                if has_aminmax(*key):
                    torch.aminmax(real[i], out=(low, high))
                else:
                    low.copy_(real[i].amin())
                    high.copy_(real[i].amax())
            for i, (smallest, largest) in zip(indices, all_slots[: len(indices)].tolist(), strict=True):
                ranges[i] = (smallest, largest)
        if not all(math.isfinite(low) and math.isfinite(high) for low, high in ranges):
            self._clear()
        return ranges

    def _slots_for(self, device: torch.device, dtype: torch.dtype, count: int) -> tuple[Tensor, list[Any]]:
        """Return memory for ``count`` ranges, and a pair of views for each."""
        known = self._slots.get((device, dtype))
        if known is None or len(known[1]) < count:
            with torch.inference_mode(False):
                slots = torch.empty(max(count, 16), 2, dtype=dtype, device=device)
                known = self._slots[device, dtype] = slots, [pair.unbind() for pair in slots]
        return known

    def reach(self, tensor: Tensor, limit: float = math.inf) -> bool:
        """Return whether an element of ``tensor`` is nan or at least ``limit`` in magnitude; waits for the device."""
        return not all(abs(value) < limit for value in self.of([tensor])[0])


@functools.cache
def has_aminmax(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``torch.aminmax`` works on ``device``, which not every CANN release has; tried once."""
    try:
        torch.aminmax(torch.zeros(1, dtype=dtype, device=device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True
