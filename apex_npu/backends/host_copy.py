# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Copies numbers between the host and a device without a wait; an ordinary copy waits for all queued work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex_npu.backends._torch_private import labelled


class HostCopy:
    """A number that is copied to the host asynchronously.

    ``bool()`` of a tensor on a device waits for all work that is queued there. This class waits only for the work that
    was queued before the copy.
    """

    def __init__(self, number: Tensor) -> None:
        """Start the copy of ``number``, one element, on the current stream, after the work that is queued there."""
        self._arrival: Any = None
        module = _module_with_events(number.device)
        if module is None:
            self._number = number.clone()  # read on the device, on access
            return
        # Pinned memory, which a device can write at any time; torch keeps it until the copy is done.
        self._number = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
        self._arrival = module.Event()
        self._arrival.record(module.current_stream(number.device))

    def if_come(self) -> float | None:
        """Return the number if it has arrived, and else None; does not wait."""
        if self._arrival is not None:
            if not self._arrival.query():
                return None
            self._arrival = None
        return float(self._number)

    @labelled("amp.wait")
    def __bool__(self) -> bool:
        """Return whether the number is not 0; waits until it has arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
        return bool(self._number)


def number_on(number: Tensor, device: torch.device) -> Tensor:
    """Return ``number``, one or more numbers, on ``device``, which reads numbers of the host from pinned memory."""
    pinned = number.device.type == "cpu" and _module_with_events(device) is not None
    return (number.pin_memory() if pinned else number).to(device, non_blocking=pinned)


def numbers_on(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``numbers``, 1-D, as ``number_on`` does."""
    return number_on(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


def _module_with_events(device: torch.device) -> Any:
    """Return the accelerator's module in torch; None if it has no events, which tell when memory has been read."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "Event") and hasattr(module, "current_stream") else None
