# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Follows the scales of ``torch.amp.GradScaler``, in scripts that use it without amp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from apex_npu.backends.patching import patch_attribute


def follow_grad_scalers(
    undo: ExitStack, scales: Callable[[Any, float], object], unscaled: Callable[[Optimizer], object]
) -> None:
    """Report calls of GradScalers until ``undo`` is closed.

    ``scales`` is called with the losses given to ``scale`` and with the scale, before the multiplication, and
    ``unscaled`` with the optimizer whose gradients ``unscale_`` has divided.
    """

    def telling_scale(original: Any) -> Any:
        def scale(scaler: GradScaler, outputs: Any) -> Any:
            if scaler.is_enabled() and not isinstance(outputs, Iterator):  # which is read once
                scales(outputs, scaler.get_scale())
            return original(scaler, outputs)

        return scale

    def telling_unscale(original: Any) -> Any:
        def unscale(scaler: GradScaler, optimizer: Optimizer) -> None:
            original(scaler, optimizer)
            if scaler.is_enabled():
                unscaled(optimizer)

        return unscale

    for kind in _kinds(GradScaler):
        for name, telling in (("scale", telling_scale), ("unscale_", telling_unscale)):
            if name in vars(kind):
                patch_attribute(undo, kind, name, telling)


def _kinds(base: type[GradScaler]) -> Iterator[type[GradScaler]]:
    """Yield ``base`` and its subclasses, such as those of torch_npu and FSDP."""
    yield base
    for derived in base.__subclasses__():
        yield from _kinds(derived)
