# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Devices that, instead of inf, give the largest finite value and raise a flag."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex_npu.amp.grad_groups import GradGroup
from apex_npu.backends import Backend, for_device
from apex_npu.backends._torch_private import labelled


def saturates(groups: Sequence[GradGroup]) -> bool:
    """Return True if gradients are on such a device."""
    return bool(_saturating(groups))


def clear_saturation(groups: Sequence[GradGroup]) -> None:
    """Clear the overflow flags of these devices before a backward."""
    for device, backend in _saturating(groups):
        backend.clear_overflow_flag(device)


@labelled("amp.wait")
def read_and_clear_saturation(groups: Sequence[GradGroup]) -> bool:
    """Return whether such a device has saturated since, and clear its flag. Waits for the device.

    Call it before gradients are unscaled: torch_npu's kernel multiplies no gradient while the flag is raised.
    """
    found = any([backend.overflow_flag(device) for device, backend in _saturating(groups)])
    if found:
        clear_saturation(groups)
    return found


def _saturating(groups: Sequence[GradGroup]) -> list[tuple[torch.device, Backend]]:
    devices = [(device, for_device(device)) for device in {group.device for group in groups}]
    return [(device, backend) for device, backend in devices if backend.saturates()]
