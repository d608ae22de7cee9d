# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Numbers between the host and a device, without a wait: an ordinary copy of one waits for all work given so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor


class HostCopy:
    """A number that is copied to the host asynchronously.

    Asked at once, ``bool()`` of a tensor waits for all the work that the device has been given by then. This waits for
    no more than what came before the copy.
    """

    def __init__(self, number: Tensor) -> None:
        """Start the copy of ``number``, one element, on the current stream: after the work that is queued there now."""
        self._arrival: Any = None
        module = _module_with_events(number.device)
        if module is None:
            self._number = number.clone()  # read there, on access
            return
        # Memory that a device can write to at any time; torch keeps it for as long as the copy takes.
        self._number = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
        self._arrival = module.Event()
        self._arrival.record(module.current_stream(number.device))

    def if_come(self) -> float | None:
        """The number, where it has come, and None where it has not; does not wait."""
        if self._arrival is not None:
            if not self._arrival.query():
                return None
            self._arrival = None
        return float(self._number)

    def __bool__(self) -> bool:
        """True where it is not 0; waits until it has come."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
        return bool(self._number)


class HostFlag:
    """A number in memory of the host that kernels of a GPU write, and the host reads at any time, without a copy.

    Attributes:
        number: float32, one element, 0 at first; ``HostCopy`` is for kernels that write memory of their device alone.
    """

    # None is freed: a kernel that is still to run may write it after its owner is gone.
    _kept: ClassVar[list[Tensor]] = []

    def __init__(self, device: torch.device) -> None:
        """For kernels of ``device``."""
        self.number = torch.zeros(1, dtype=torch.float32, device="cpu", pin_memory=device.type != "cpu")
        self._kept.append(self.number)

    def is_raised(self) -> bool:
        """True where it is not 0 by now."""
        return self.number.item() != 0.0


def number_on(number: Tensor, device: torch.device) -> Tensor:
    """``number``, one or more, on ``device``: from the host it comes as ``numbers_on`` has them."""
    pinned = number.device.type == "cpu" and _module_with_events(device) is not None
    return (number.pin_memory() if pinned else number).to(device, non_blocking=pinned)


def numbers_on(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``numbers`` of the host, 1-D, on ``device``: copied from memory that the device reads by itself."""
    pinned = _module_with_events(device) is not None
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=pinned)


def _module_with_events(device: torch.device) -> Any:
    """The module of an accelerator in torch; None where it has no events, which tell when memory has been read."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "Event") and hasattr(module, "current_stream") else None
