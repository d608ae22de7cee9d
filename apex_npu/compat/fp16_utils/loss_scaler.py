# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loss scalers of apex.fp16_utils, for loops that scale the loss themselves. ``FP16_Optimizer`` uses amp's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from apex_npu.compat.fp16_utils.fp16util import to_python_float

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


class LossScaler:
    """A static loss scale."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The current scale."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: a static scale does not check."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: a static scale stays."""

    def scale_gradient(self, module: Any, grad_in: tuple[Tensor, ...], grad_out: Any) -> tuple[Tensor, ...]:
        """Return the input gradients times the scale; a backward hook of a module."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward from the loss times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that shrinks at an overflow, to at least 1, and grows after ``scale_window`` steps without one."""

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return True if a gradient of ``params`` holds inf or nan."""
        return any(not bool(torch.isfinite(param.grad).all()) for param in params if param.grad is not None)

    def update_scale(self, overflow: bool) -> None:
        """Adjust the scale to the outcome of one step."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
