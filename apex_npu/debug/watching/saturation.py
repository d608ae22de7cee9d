# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How overflows appear on a device: as inf, or as the largest number and a flag."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.backends import Backend, for_device
from apex_npu.debug.watching.calls import Call


class Spreading:
    """Devices where a result that overflows is inf, and operators that read it have results that are not finite.

    Attributes:
        saturates: Whether an overflow gives the largest number instead of inf.
        raised: Whether the overflow flag was raised since amp last cleared it.
        constants: On saturating devices, the calls with inf or nan among their own arguments, such as masks, which do
            not count as overflows.
    """

    saturates = False
    raised = False
    constants: Sequence[Call] = ()

    def take(self) -> None:
        """Clear the flag before an operator, and remember its value for amp."""

    def read(self) -> bool:
        """Return whether the flag is raised, and clear it."""
        return False

    def leave(self) -> None:
        """Note that operators which are not watched follow and may raise the flag for amp."""

    def hand_back(self) -> None:
        """Raise the flag if an operator has raised it since amp last cleared it."""

    def clear(self) -> None:
        """Clear the flag, because a diagnostic operator may have raised it."""

    def limit(self, tensor: Tensor) -> float:
        """Return the smallest magnitude in ``tensor`` that counts as not finite."""
        return float("inf")

    def goes_on(self, call: Call, is_bad: bool | None) -> bool | None:
        """Return whether readers of a result of ``call`` inherit its fault; ``is_bad``: the result is not finite."""
        return is_bad

    def excuses(self, call: Call) -> bool:
        """Return whether ``call`` is not an overflow although its result is not finite."""
        return False


class Saturating(Spreading):
    """Devices where a result that overflows is the largest number and raises a flag.

    The results are finite, so whatever reads them inherits the fault. amp finds the flag as if nothing had watched.
    """

    saturates = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Set the ``devices`` whose flags are read."""
        self._devices: list[tuple[torch.device, Backend]] = [(device, for_device(device)) for device in devices]
        self._is_ours = False
        self.constants: list[Call] = []

    def take(self) -> None:
        if not self._is_ours:
            self.read()
            self._is_ours = True

    def read(self) -> bool:
        raised = [device for device, backend in self._devices if backend.overflow_flag(device)]
        for device in raised:
            for_device(device).clear_overflow_flag(device)
        self.raised |= bool(raised)
        return bool(raised)

    def leave(self) -> None:
        self._is_ours = False

    def hand_back(self) -> None:
        if self.raised:
            self.raised = False
            for device, _ in self._devices:
                torch.full((1,), 65504.0, dtype=torch.float16, device=device).mul_(2)
        self._is_ours = False

    def clear(self) -> None:
        for device, backend in self._devices:
            backend.clear_overflow_flag(device)

    def limit(self, tensor: Tensor) -> float:
        return torch.finfo(tensor.dtype).max if tensor.dtype.is_floating_point else float("inf")

    def goes_on(self, call: Call, is_bad: bool | None) -> bool:
        return call.is_bad or bool(call.causes)

    def excuses(self, call: Call) -> bool:
        if call.from_constant:
            self.constants.append(call)
        return call.from_constant
