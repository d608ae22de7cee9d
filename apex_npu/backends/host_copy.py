# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A number of a device that goes to the host by itself, for whoever asks later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A number that is brought to the host while the host goes on.

    Asked at once, ``bool()`` of a tensor waits for all the work that the device has been given by then. This waits for
    no more than what came before the copy.
    """

    def __init__(self, number: Tensor) -> None:
        """Start the copy of ``number``, one element: behind the work that is there now, on the current stream."""
        self._arrival: Any = None
        module = None if number.device.type == "cpu" else torch.get_device_module(number.device)
        if module is None or not hasattr(module, "Event") or not hasattr(module, "current_stream"):
            self._number = number.clone()  # read there, when it is asked for
            return
        # Memory that a device can write to at any time; torch keeps it for as long as the copy takes.
        self._number = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
        self._arrival = module.Event()
        self._arrival.record(module.current_stream(number.device))

    def __bool__(self) -> bool:
        """True where it is not 0; waits until it has come."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
        return bool(self._number)
