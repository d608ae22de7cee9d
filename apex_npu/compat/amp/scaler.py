# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``LossScaler``: a loss scaler with Apex's interface. The arithmetic is in ``amp/scaler.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from apex_npu.amp.scaler import DynamicScaleOptions, make_scaler
from apex_npu.amp.scaler import LossScaler as Scaler
from apex_npu.amp.session import current

__all__ = ["LossScaler", "axpby_check_overflow_python", "scale_check_overflow_python"]


def _checked(value: Any) -> float:
    scale = float(value)
    if not 0.0 < scale < math.inf:
        raise ValueError(f"a loss scale must be positive and finite, got {value!r}")
    return scale


# Apex's name of each number that changes, its name here, and the conversion of an assigned value.
_NUMBERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "_loss_scale": ("scale", _checked),
    "_unskipped": ("good_steps", int),
    "_has_overflow": ("found_inf", bool),
}
# Apex's name of each option that can be read and set from outside.
_OPTIONS = {"_max_loss_scale": "max_scale", "_min_loss_scale": "min_scale", "_scale_seq_len": "growth_interval"}


class LossScaler:
    """A loss scale, with the attributes and methods that Apex's scaler has.

    The scale grows and shrinks by ``scale_factor``, which Apex ignored. A ``min_loss_scale`` of 0 sets no minimum.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.
    """

    has_fused_kernel = False

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        backoff = 1.0 / scale_factor if scale_factor else 0.0
        options = DynamicScaleOptions(
            init_scale, scale_factor, backoff, scale_window, min_loss_scale or None, max_loss_scale
        )
        self._own = make_scaler("dynamic" if loss_scale == "dynamic" else _checked(loss_scale), options)

    @classmethod
    def view(cls, scaler: Scaler) -> LossScaler:
        """Return a live view of ``scaler``."""
        view = cls.__new__(cls)
        view._own = scaler
        return view

    @property
    def _scaler(self) -> Scaler:
        session = current()
        if session is not None:
            session.resolve_checks(self._own)  # its last block may have changed the scale
        return self._own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LossScaler) and other._own is self._own

    def __hash__(self) -> int:
        return id(self._own)

    @property
    def dynamic(self) -> bool:
        """True if the scale changes; False for a static scale."""
        return self._scaler.dynamic

    def __getattr__(self, name: str) -> Any:
        if name in _NUMBERS:
            return getattr(self._scaler, _NUMBERS[name][0])
        if name in _OPTIONS:
            return getattr(getattr(self._scaler, "options", DynamicScaleOptions()), _OPTIONS[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NUMBERS:
            own, converted = _NUMBERS[name]
            setattr(self._scaler, own, converted(value))
        elif name not in _OPTIONS:
            object.__setattr__(self, name, value)
        elif isinstance(options := getattr(self._scaler, "options", None), DynamicScaleOptions):
            self._scaler.options = replace(options, **{_OPTIONS[name]: value})  # type: ignore[attr-defined]

    def loss_scale(self) -> float:
        """Return the factor that the loss is multiplied by."""
        return self._scaler.scale

    def clear_overflow_state(self) -> None:
        """Forget an overflow, before the gradients of a new step are unscaled."""
        self._has_overflow = False

    def update_scale(self) -> bool:
        """Choose the next scale; return True if the gradients unscaled last overflowed and the step is skipped."""
        should_skip = self.dynamic and self._has_overflow
        self._scaler.update(should_skip)
        return should_skip

    def unscale(
        self,
        model_grads: Sequence[Tensor | None],
        master_grads: Sequence[Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write model gradients, divided by the scale, into master gradients; after an overflow do nothing.

        Where a model gradient is None, the master gradient stays as it is. ``scale_override`` replaces the scale.
        """
        scale = self._loss_scale if scale_override is None else _checked(scale_override)
        for model, master in zip(model_grads, master_grads, strict=True):
            if model is not None and not self._has_overflow:
                self._has_overflow = scale_check_overflow_python(model, master, 1.0 / scale, self.dynamic)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write model gradients divided by the scale, plus those stashed before, into master gradients.

        Only the model gradients are checked for inf and nan. After an overflow nothing is done. ``scale_override``
        holds the scales of the model gradients, the stashed ones and the sum; by default they are this scale, 1 and 1.
        """
        model_scale, stashed_scale, out_scale = scale_override or (self._loss_scale, 1.0, 1.0)
        a, b = out_scale / model_scale, out_scale / stashed_scale
        for model, stashed, master in zip(model_grads, stashed_master_grads, master_grads, strict=True):
            if not self._has_overflow:
                self._has_overflow = axpby_check_overflow_python(model, stashed, master, a, b, self.dynamic)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("dynamic", *_NUMBERS, *_OPTIONS)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dynamic = state["dynamic"]
        self.__init__(  # type: ignore[misc]
            "dynamic" if dynamic else state["_loss_scale"],
            scale_window=state["_scale_seq_len"],
            min_loss_scale=state["_min_loss_scale"],
            max_loss_scale=state["_max_loss_scale"],
        )
        for name in _NUMBERS:
            setattr(self, name, state[name])


@torch.no_grad()
def scale_check_overflow_python(
    model_grad: Tensor, master_grad: Tensor, scale: float, check_overflow: bool = False
) -> bool:
    """Write ``model_grad`` times ``scale`` into ``master_grad``, which may be the same tensor.

    With ``check_overflow``, wait for the device; if ``model_grad`` has inf or nan, return True and write nothing.
    """
    if check_overflow and not torch.isfinite(model_grad).all():
        return True
    master_grad.copy_(model_grad).mul_(scale)
    return False


@torch.no_grad()
def axpby_check_overflow_python(
    model_grad: Tensor, stashed_grad: Tensor, master_grad: Tensor, a: float, b: float, check_overflow: bool = False
) -> bool:
    """Write ``a * model_grad + b * stashed_grad`` into ``master_grad``, which may be one of the two.

    With ``check_overflow``, wait for the device; if ``model_grad`` has inf or nan, return True and write nothing.
    """
    if check_overflow and not torch.isfinite(model_grad).all():
        return True
    master_grad.copy_(model_grad.to(master_grad.dtype) * a + stashed_grad * b)
    return False
