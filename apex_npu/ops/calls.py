# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules by way of torch's dispatcher, with numbers that the host knows or that only the device can read.

A rule has two overloads. The second, ``on_device``, takes more tensors, of one element each, or None: ``lr_tensor``,
and ``step_tensor`` where the rule has a ``step``, which are read instead of the numbers; and ``found_inf``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What may be a tensor, and what stands in its place then, unread.
_NUMBERS: dict[str, float | int] = {"lr": 0.0, "step": 1}


def call(rule: str, *operands: Tensor | None, found_inf: Tensor | None, **options: Any) -> None:
    """Call ``rule``, whose numbers may be tensors."""
    op = getattr(torch.ops.apex_npu, rule)
    on_device = [name for name in _NUMBERS if isinstance(options.get(name), Tensor)]
    if not on_device and found_inf is None:
        op.default(*operands, **options)
        return
    for name in on_device:
        options[f"{name}_tensor"] = options[name]
        options[name] = _NUMBERS[name]
    op.on_device(*operands, found_inf=found_inf, **options)


def taking_tensors(kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel of the overload ``on_device``, from one that takes tensors where there may be numbers."""

    def on_device(
        *operands: Any, lr_tensor: Tensor | None = None, step_tensor: Tensor | None = None, **options: Any
    ) -> None:
        if lr_tensor is not None:
            options["lr"] = lr_tensor.reshape(())
        if step_tensor is not None:
            options["step"] = step_tensor.reshape(())
        kernel(*operands, **options)

    return on_device


def asking_host(rule: str) -> Callable[..., None]:
    """The same for the CPU, where nobody has to wait for numbers: its kernels need not know of tensors."""

    def kernel(*operands: Any, lr: float | Tensor, found_inf: Tensor | None = None, **options: Any) -> None:
        if found_inf is not None and bool(found_inf):
            return
        if "step" in options:
            options["step"] = int(options["step"])
        getattr(torch.ops.apex_npu, rule).default(*operands, lr=float(lr), **options)

    return taking_tensors(kernel)
