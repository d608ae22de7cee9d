# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How overflows appear on a device: as inf, or as the largest number and a flag."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.backends import Backend, for_device
from apex_npu.debug.watching.calls import Call


class Saturation:
    """The overflow flags of devices where a result that overflows is the largest number and raises a flag.

    The results are finite, so whatever reads them inherits the fault. amp finds the flag as if nothing had watched.
    Elsewhere there are no such devices: a result that overflows is inf, and no method has an effect.

    Attributes:
        saturates: Whether there are such devices.
        raised: Whether a flag was raised since amp last cleared it.
        constants: The calls with inf or nan among their own arguments, such as masks, which do not count as overflows.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Set the ``devices`` that saturate; empty if none does."""
        self._devices: list[tuple[torch.device, Backend]] = [(device, for_device(device)) for device in devices]
        self.saturates = bool(devices)
        self.raised = False
        self.constants: list[Call] = []

    def read(self) -> bool:
        """Return whether the flag is raised, clear it, and remember it for amp."""
        raised = [backend.overflow_flag(device) for device, backend in self._devices]
        if any(raised):
            self.raised = True
            self.clear()
        return any(raised)

    def hand_back(self) -> None:
        """Raise the flag if an operator has raised it since amp last cleared it."""
        if self.raised:
            self.raised = False
            for device, _ in self._devices:
                torch.full((1,), 65504.0, dtype=torch.float16, device=device).mul_(2)

    def clear(self) -> None:
        """Clear the flag, because a diagnostic operator may have raised it."""
        for device, backend in self._devices:
            backend.clear_overflow_flag(device)

    def limit(self, tensor: Tensor) -> float:
        """Return the smallest magnitude in ``tensor`` that counts as not finite."""
        return torch.finfo(tensor.dtype).max if self.saturates and tensor.dtype.is_floating_point else math.inf

    def goes_on(self, call: Call, is_bad: bool | None) -> bool | None:
        """Return whether readers of a result of ``call`` inherit its fault; ``is_bad``: the result is not finite."""
        return call.is_bad or bool(call.causes) if self.saturates else is_bad

    def excuses(self, call: Call) -> bool:
        """Return whether ``call`` is not an overflow although its result is not finite."""
        if not (self.saturates and call.from_constant):
            return False
        self.constants.append(call)
        return True
