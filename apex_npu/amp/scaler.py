# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loss scales, and the decisions about steps that follow from their updates.

A scaler is arithmetic on two numbers. It does not check gradients; ``update`` takes the result of a check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from apex_npu.amp.policy import LossScale
from apex_npu.backends.script_warnings import warn

# Below this, 1 / scale is no longer finite in float32: gradients could not be unscaled.
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True)
class DynamicScaleOptions:
    """The rules of a dynamic loss scale.

    Attributes:
        init_scale: The first scale; ``max_scale`` caps it.
        growth_factor: Factor of the scale after ``growth_interval`` steps without overflow.
        backoff_factor: Factor of the scale after an overflow.
        growth_interval: Number of steps without overflow before the scale grows.
        min_scale: Smallest scale. None: it may shrink as far as float32 allows.
        max_scale: Largest scale.
        hysteresis: Number of consecutive overflows before the scale shrinks; the earlier ones only skip their step. As
            in Megatron-LM, the scale then shrinks at every further overflow until a step succeeds.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float = 2.0**24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ValueError: A value is out of range; the message uses the argument names of ``amp.initialize``.
            TypeError: A value is not a number.
        """
        for name, value in (
            ("dynamic_init_scale", self.init_scale),
            ("scale_growth_factor", self.growth_factor),
            ("scale_backoff_factor", self.backoff_factor),
            ("scale_window", self.growth_interval),
            ("min_loss_scale", 1.0 if self.min_scale is None else self.min_scale),
            ("max_loss_scale", self.max_scale),
            ("scale_hysteresis", self.hysteresis),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        if self.growth_factor < 1.0:
            raise ValueError(f"scale_growth_factor must be >= 1, got {self.growth_factor!r}")
        if self.backoff_factor >= 1.0:
            raise ValueError(f"scale_backoff_factor must be in (0, 1), got {self.backoff_factor!r}")
        for name, count in (("scale_window", self.growth_interval), ("scale_hysteresis", self.hysteresis)):
            if count != int(count) or count < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {count!r}")
        if self.max_scale > 2.0**126:
            raise ValueError(f"max_loss_scale must be at most 2**126, got {self.max_scale!r}")
        if self.min_scale is not None and self.min_scale > self.max_scale:
            raise ValueError(f"min_loss_scale {self.min_scale!r} must not exceed max_loss_scale {self.max_scale!r}")


class LossScaler:
    """A constant scale, and the interface of other scalers.

    A constant scale skips no step. The first overflow emits a warning, if checking for it costs nothing.

    Attributes:
        dynamic: False: gradients need not be checked, so no step waits for the device.
        good_steps: Steps since the last overflow, or since the scale last grew. Checkpoints call it "unskipped".
        found_inf: The argument of the last update.
        said: The scaler's warning has been emitted.
    """

    dynamic = False

    def __init__(self, scale: float) -> None:
        """Make a scaler with ``scale``, a positive number."""
        self.scale = scale
        self.good_steps = 0
        self.found_inf = False
        self.said = False

    def update(self, found_inf: bool) -> None:
        """Count the step; the scale stays. Warn once if ``found_inf``."""
        self.good_steps += 1
        if found_inf:
            self.warn_once(
                f"gradients have overflowed under the static loss scale {self.scale}, which skips no step: inf or nan "
                'reaches the parameters. Use loss_scale="dynamic", or a smaller scale'
            )

    def warn_once(self, text: str) -> None:
        """Warn, unless this scaler has warned before."""
        if not self.said:
            self.said = True
            warn(text)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the count of steps in Apex's format."""
        return {"loss_scale": self.scale, "unskipped": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of ``state_dict``."""
        scale, good_steps = float(state["loss_scale"]), int(state["unskipped"])
        if not 0.0 < scale < math.inf:
            raise ValueError(f"loss_scale in the state dict must be positive and finite, got {scale!r}")
        if good_steps < 0:
            raise ValueError(f"unskipped in the state dict must be >= 0, got {good_steps!r}")
        self.scale, self.good_steps = scale, good_steps


class DynamicLossScaler(LossScaler):
    """A scale that shrinks when gradients overflow, and grows after enough steps without overflow."""

    dynamic = True

    def __init__(self, options: DynamicScaleOptions) -> None:
        """Start at ``options.init_scale``, within its bounds."""
        super().__init__(max(min(options.init_scale, options.max_scale), options.min_scale or _SMALLEST_SCALE))
        self.options = options
        self._overflows_in_a_row = 0

    def update(self, found_inf: bool) -> None:
        """Update the scale after a step."""
        options, before, scale = self.options, self.scale, self.scale
        good_steps, overflows = (0, self._overflows_in_a_row + 1) if found_inf else (self.good_steps + 1, 0)
        if found_inf and overflows >= options.hysteresis:
            scale = max(scale * options.backoff_factor, options.min_scale or _SMALLEST_SCALE)
        # >= rather than ==: a count resumed from a run with a longer window must still grow.
        elif not found_inf and good_steps >= options.growth_interval:
            scale, good_steps = min(scale * options.growth_factor, options.max_scale), 0
        self.found_inf, self.scale, self.good_steps, self._overflows_in_a_row = found_inf, scale, good_steps, overflows
        if found_inf and before >= 1.0 > scale:
            self.warn_once(
                f"the loss scale has fallen to {scale}: gradients hold inf or nan even without scaling. If "
                "smaller scales do not help, look for the cause in the loss or the data"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state in Apex's format. With a hysteresis add the count of overflows, which Apex ignores."""
        own = {} if self.options.hysteresis == 1 else {"overflows_in_a_row": self._overflows_in_a_row}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of ``state_dict``."""
        super().load_state_dict(state)
        self._overflows_in_a_row = int(state.get("overflows_in_a_row", 0))


def make_scaler(loss_scale: LossScale, options: DynamicScaleOptions) -> LossScaler:
    """Return the scaler for a policy's ``loss_scale``."""
    return DynamicLossScaler(options) if loss_scale == "dynamic" else LossScaler(float(loss_scale))


class StepDecision(NamedTuple):
    """The decision of a scale_loss block about the step that follows it."""

    skip: bool
    loss_id: int
    scale_before: float
    scale_after: float


@dataclass(frozen=True)
class StepReport:
    """The outcome of one call of ``optimizer.step()`` under amp.

    Attributes:
        applied: False: the step was skipped because a gradient was inf or nan.
        loss_id: The loss that decided the outcome; None if no scale_loss came before the step.
        scale_before: The scale of that loss in the backward before the step.
        scale_after: The scale of that loss after the decision.
        skipped_steps: Number of steps of this optimizer skipped so far.
        skips_in_a_row: Number of consecutive steps skipped up to this one; 0 if this step was applied.

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> with amp.scale_loss(loss_fn(model(input), target), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> amp.last_step(optimizer).applied
        True
    """

    applied: bool
    loss_id: int | None
    scale_before: float | None
    scale_after: float | None
    skipped_steps: int
    skips_in_a_row: int

    @property
    def skipped(self) -> bool:
        """The opposite of ``applied``."""
        return not self.applied


# The report of a step with ``enabled=False``, where amp decides nothing.
APPLIED = StepReport(True, None, None, None, 0, 0)
