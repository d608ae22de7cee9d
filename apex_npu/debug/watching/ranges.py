# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Ranges``: the smallest and the largest elements of tensors, and what stands for inf where a device saturates."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex_npu.backends import Backend, for_device


class OverflowFlag:
    """What devices raise that have the largest number in place of inf; amp finds it as if nothing had looked at it.

    Attributes:
        raised: Since amp last cleared it.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Of ``devices``, which saturate; of none, it is never raised."""
        self.raised = False
        self._devices: list[tuple[torch.device, Backend]] = [(device, for_device(device)) for device in devices]
        self._is_ours = False

    def take(self) -> None:
        """Clear it for the operator that follows, and remember it for amp."""
        if self._devices and not self._is_ours:
            self.read()
            self._is_ours = True

    def read(self) -> bool:
        """Whether it is raised; it is clear afterwards."""
        raised = False
        for device, backend in self._devices:
            if backend.overflow_flag(device):
                backend.clear_overflow_flag(device)
                raised = True
        self.raised |= raised
        return raised

    def leave(self) -> None:
        """What runs next may raise it for amp."""
        self._is_ours = False

    def hand_back(self) -> None:
        """Raise it, if an operator has raised it since amp last cleared it."""
        if self.raised:
            self.raised = False
            for device, _ in self._devices:
                torch.full((1,), 65504.0, dtype=torch.float16, device=device).mul_(2)
        self._is_ours = False

    def clear(self) -> None:
        """Clear it, as it has been raised by what looks at operators."""
        for device, backend in self._devices:
            backend.clear_overflow_flag(device)


class Ranges:
    """Reads the ranges of tensors, with memory of its own for the results."""

    def __init__(self, flag: OverflowFlag) -> None:
        """``flag`` is cleared where reading a range has raised it."""
        self._flag = flag
        self._slots: dict[tuple[torch.device, torch.dtype], tuple[Tensor, list[Any]]] = {}

    def of(self, tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
        """The smallest and the largest element of each; nan for both where there is one. Waits for the device.

        One launch for each, and one wait for all of a device and dtype.
        """
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        real = [torch.view_as_real(t.resolve_conj()) if t.dtype.is_complex else t.detach() for t in tensors]
        for i, tensor in enumerate(real):
            alike.setdefault((tensor.device, tensor.dtype), []).append(i)
        ranges = [(0.0, 0.0)] * len(real)
        for key, indices in alike.items():
            all_slots, pairs = self._slots_for(*key, len(indices))
            is_one_launch = has_aminmax(*key)
            for i, (low, high) in zip(indices, pairs, strict=False):
                if is_one_launch:
                    torch.aminmax(real[i], out=(low, high))
                else:
                    low.copy_(real[i].amin())
                    high.copy_(real[i].amax())
            numbers = all_slots[: len(indices)].tolist()
            for i, (smallest, largest) in zip(indices, numbers, strict=True):
                ranges[i] = (smallest, largest)
        if not all(math.isfinite(low) and math.isfinite(high) for low, high in ranges):
            self._flag.clear()
        return ranges

    def _slots_for(self, device: torch.device, dtype: torch.dtype, count: int) -> tuple[Tensor, list[Any]]:
        """Memory for ``count`` ranges: all of it, and views of each."""
        known = self._slots.get((device, dtype))
        if known is None or len(known[1]) < count:
            with torch.inference_mode(False):
                slots = torch.empty(max(count, 16), 2, dtype=dtype, device=device)
                known = self._slots[device, dtype] = slots, [pair.unbind() for pair in slots]
        return known

    def of_one(self, tensor: Tensor) -> tuple[float, float]:
        """``of`` one."""
        return self.of([tensor])[0]

    def is_bad(self, tensor: Tensor) -> bool:
        """Whether an element of ``tensor`` is inf or nan; waits for the device."""
        return not all(map(math.isfinite, self.of_one(tensor)))

    def is_at_limit(self, tensor: Tensor) -> bool:
        """Whether an element is inf or nan, or what a device that saturates makes of them."""
        largest = torch.finfo(tensor.dtype).max if tensor.dtype.is_floating_point else math.inf
        return not all(abs(value) < largest for value in self.of_one(tensor))


@functools.cache
def has_aminmax(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch.aminmax`` works there, which not every CANN has; asked once."""
    try:
        torch.aminmax(torch.zeros(1, dtype=dtype, device=device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True
