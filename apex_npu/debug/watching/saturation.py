# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What becomes of results that overflow: inf, which spreads, or on some devices the largest number and a flag."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.backends import Backend, for_device
from apex_npu.debug.watching.calls import Call


class Spreading:
    """Results that overflow are inf, which what reads them spreads: they are known by their ranges.

    Attributes:
        saturates: A device has the largest number in place of inf.
        raised: Its flag of overflows is raised since amp last cleared it.
        constants: Calls whose own arguments have inf or nan, as masks have, where these are not counted as overflows.
    """

    saturates = False
    raised = False
    constants: Sequence[Call] = ()

    def take(self) -> None:
        """Clear the flag for the operator that follows, and remember it for amp."""

    def read(self) -> bool:
        """Whether the flag is raised; it is clear afterwards."""
        return False

    def leave(self) -> None:
        """What runs next may raise the flag for amp."""

    def hand_back(self) -> None:
        """Raise the flag, if an operator has raised it since amp last cleared it."""

    def clear(self) -> None:
        """Clear the flag, as it has been raised by what looks at operators."""

    def limit(self, tensor: Tensor) -> float:
        """The smallest magnitude that an element has which is not finite, or stands for one that is not."""
        return float("inf")

    def goes_on(self, call: Call, is_bad: bool | None) -> bool | None:
        """Whether what reads a result of ``call`` inherits its fault; ``is_bad``: it is not finite."""
        return is_bad

    def excuses(self, call: Call) -> bool:
        """Whether ``call``, with a result that is not finite, is no overflow."""
        return False


class Saturating(Spreading):
    """Results that overflow are the largest number, and raise a flag, which amp finds as if nothing had looked at it.

    They go on as finite numbers, so that whatever reads them inherits the fault.
    """

    saturates = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Of ``devices``."""
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
