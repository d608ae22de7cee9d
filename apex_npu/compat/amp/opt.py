# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``OptimWrapper``: an optimizer of the API before ``amp.initialize``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.adoption import adopt
from apex_npu.amp.optimizer_state import inner_optimizer, state_of
from apex_npu.amp.preconditions import check_adoptable
from apex_npu.amp.scale_loss import scale_loss
from apex_npu.amp.scaler import DynamicScaleOptions, make_scaler

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """An optimizer with a loss scale for each of several losses per step; everything else is the optimizer's.

    Run ``with optimizer.scale_loss(loss) as scaled_loss: scaled_loss.backward()`` once per loss, always in the same
    order, then ``step()``. The step is skipped if a gradient was inf or nan. Once the handle is inactive, the wrapper
    passes everything through. ``optimizer`` remains usable without the wrapper.
    """

    def __init__(self, optimizer: Optimizer, amp_handle: Any, num_loss: int) -> None:
        if isinstance(num_loss, bool) or not isinstance(num_loss, int) or num_loss < 1:
            raise ValueError(f"num_loss must be an integer >= 1, got {num_loss!r}")
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._first_loss_id = 0
        session = getattr(amp_handle, "_session", None)
        if session is not None:
            if state_of(optimizer) is None:
                check_adoptable(inner_optimizer(optimizer))
                adopt(inner_optimizer(optimizer), session, {})
            self._first_loss_id = len(session.scalers)
            loss_scale = session.policy.loss_scale
            session.scalers.extend(make_scaler(loss_scale, DynamicScaleOptions()) for _ in range(num_loss))

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the loss times its scale; then unscale the gradients, and decide whether the step is to be skipped.

        Raises:
            RuntimeError: ``num_loss`` losses have already been scaled since the last step.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise RuntimeError(
                f"scale_loss was called for loss {self._loss_idx + 1} since the last step(), but the optimizer was "
                f"wrapped for {self._num_loss}; pass num_loss={self._loss_idx + 1} to wrap_optimizer"
            )
        with scale_loss(loss, self._optimizer, loss_id=self._first_loss_id + self._loss_idx) as scaled_loss:
            yield scaled_loss
        self._loss_idx += 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer, unless a gradient has overflowed.

        Raises:
            NotImplementedError: A closure is passed while casts are on.
        """
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure)
        if closure is not None:
            raise NotImplementedError(
                "amp's optimizer wrapper takes no closure; compute the loss, call scale_loss and backward, then step()"
            )
        self._loss_idx = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
