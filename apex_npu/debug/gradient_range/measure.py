# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``gradient_range``: measures the gradients of an optimizer, at the loss scale and at a larger one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.inspect import Observer, decision_of, leave, loss_scale, models, observe, parameters, require, stepped
from apex_npu.amp.policy import Policy
from apex_npu.backends import for_device
from apex_npu.debug.gradient_range.report import ZERO, GradientRange, ParameterRange, exponent_census, exponent_of
from apex_npu.debug.gradients import adopted_policy, gradients_in, names_of
from apex_npu.debug.text import first_line, listed
from apex_npu.debug.watching.kept_state import KeptState
from apex_npu.debug.watching.operators import followed, gradient_values
from apex_npu.debug.watching.stream import Stream
from apex_npu.ops import LOW_PRECISION


class _Probe(Observer):
    """A context that measures the gradients of one block at its scale and at a larger one.

    It computes them separately: they are not accumulated, and the state of the block does not change. If autograd
    cannot compute them separately, it measures the gradients that the block leaves.
    """

    def __init__(self, optimizer: Optimizer, policy: Policy, factor: float) -> None:
        self._optimizer, self._policy, self._factor = optimizer, policy, factor
        self._measures_end = False

    def __enter__(self) -> GradientRange:
        name, dtype = type(self._optimizer).__name__, _dtype_of(self._policy)
        self._found = GradientRange(name, self._policy.opt_level, self._factor, dtype)
        observe(self)
        return self._found

    def __exit__(self, *_: object) -> None:
        leave(self)

    def block_begins(self, loss: Tensor, optimizers: Any, loss_id: int, scale: float, dynamic: bool) -> None:
        ours = any(one is self._optimizer for one in stepped(optimizers))
        self._measures_end = False
        if ours and loss.requires_grad and not self._found.parameters:
            # Checkpoints call forwards again, which must not be watched.
            with KeptState(models(), [loss.device]).put_back(), Stream.none_watches():
                self._measure(loss, scale)

    def block_ended(self) -> None:
        if self._measures_end:
            with suppress(RuntimeError):  # an exception has ended the block, before there were gradients
                _measure_present(self._found, self._optimizer)

    def _measure(self, loss: Tensor, scale: float) -> None:
        sources = [param for param in parameters(self._optimizer) if param.requires_grad]
        if not sources:
            return
        wide = loss.float() if loss.dtype in LOW_PRECISION else loss
        try:
            grads = _gradients(wide * scale, sources)
            measured = [
                (s, g) for s, g in zip(sources, grads, strict=True) if g is not None and followed(g) is not None
            ]
            if not measured:
                raise RuntimeError("autograd.grad reaches no parameter, as inside a reentrant checkpoint")
            larger = _gradients(wide * (scale * self._factor), sources)
        except RuntimeError as error:  # such as a checkpoint that only backward() may enter
            self._note(f"the lost elements could not be measured: {first_line(error)}")
            self._measures_end = True
            return
        ranges = _fill(self._found, measured, scale, 2.0 ** -exponent_of(scale))
        missed = [s for s, g in zip(sources, grads, strict=True) if g is None]
        if missed:
            shown = listed(names_of(missed))
            self._note(
                f"not measured: {shown}, which this loss does not use, or uses only inside reentrant checkpoints"
            )
        factor = 2.0 ** -exponent_of(scale) / self._factor
        there = {id(source): grad for source, grad in zip(sources, larger, strict=True)}
        for one, (source, here) in zip(ranges, measured, strict=True):
            grad = there[id(source)]
            if one.lost is None and grad is not None and not _overflowed(grad):
                counts = exponent_census([torch.where(here == 0, grad, torch.zeros_like(grad))], factor)[0]
                counts[ZERO] = 0
                one.set_lost(counts)

    def _note(self, text: str) -> None:
        if text not in self._found.notes:
            self._found.notes.append(text)


def _gradients(loss: Tensor, sources: Sequence[Tensor]) -> list[Tensor | None]:
    with torch.enable_grad():
        grads = torch.autograd.grad(loss, sources, retain_graph=True, allow_unused=True)
    return [None if grad is None else gradient_values(grad) for grad in grads]


def _overflowed(grad: Tensor) -> bool:
    largest = torch.finfo(grad.dtype).max if for_device(grad.device).saturates() else math.inf
    return not bool((grad.abs() < largest).all())


def _fill(
    found: GradientRange, grads: Sequence[tuple[Tensor, Tensor]], scale: float, factor: float
) -> list[ParameterRange]:
    """Add the gradients of parameters to ``found``, unscaled by ``factor``; return their ranges."""
    ranges = []
    found.scale = scale
    names = names_of([source for source, _ in grads])
    for name, row in zip(names, exponent_census([grad for _, grad in grads], factor), strict=True):
        one = found.parameters[name] = ParameterRange(name, row, exponent_of(scale), found.dtype)
        if found.probe is not None and not one.zeros:  # nothing can be lost, also if the larger scale overflows
            one.set_lost(np.zeros_like(row))
        ranges.append(one)
    return ranges


@overload
def gradient_range(optimizer: Optimizer) -> GradientRange: ...
@overload
def gradient_range(optimizer: Optimizer, probe: float) -> Any: ...
def gradient_range(optimizer: Optimizer, probe: float | None = None) -> Any:
    """Measure the range of the gradients of ``optimizer``: which float16 cannot hold, and which loss scale suffices.

    Call it after a ``scale_loss`` block, before the step and before ``zero_grad``. It takes one pass over the gradients
    and counts them on the host; they do not change.

    With ``probe`` it is a context for one iteration. In the first block of ``optimizer`` it computes gradients twice
    more, at the loss scale and at ``probe`` times the loss scale. Elements that are zero at the first and not at the
    second are *lost*; they are unknown if the larger scale overflows. The results of the iteration do not change; hooks
    of tensors are called for each backward.

    Args:
        optimizer: An optimizer that was passed to ``amp.initialize``.
        probe: The factor on the loss scale to try, larger than 1; 2**8 is a good choice. None tries no other scale.

    Returns:
        A ``GradientRange``, or with ``probe`` a context that yields one, a new one at each entry.

    Raises:
        RuntimeError: ``optimizer`` was not passed to ``amp.initialize``; or there is no gradient.
        ValueError: ``probe`` is not larger than 1.

    Example::

        >>> optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> with amp.debug.gradient_range(optimizer, probe=2.0**8) as r:
        ...     with amp.scale_loss(model(input).sum(), optimizer) as scaled_loss:
        ...         scaled_loss.backward()
        >>> r["weight"].lost
        0
    """
    (inner,) = stepped(optimizer)
    policy = adopted_policy(inner, "gradient_range")
    require("gradient_range")
    if probe is not None:
        if isinstance(probe, bool) or not isinstance(probe, (int, float)) or not 1 < probe < math.inf:
            raise ValueError(f"probe, the factor on the loss scale to try, must be larger than 1, got {probe!r}")
        return _Probe(inner, policy, float(probe))
    found = GradientRange(type(inner).__name__, policy.opt_level, dtype=_dtype_of(policy))
    _measure_present(found, inner)
    return found


def _dtype_of(policy: Policy) -> torch.dtype:
    """Return the dtype in which models of ``policy`` compute most of their gradients."""
    return policy.autocast_dtype if policy.patch_torch_functions else policy.cast_model_type or torch.float32


@torch.no_grad()
def _measure_present(found: GradientRange, optimizer: Optimizer) -> None:
    decision = decision_of(optimizer)
    scale = loss_scale(0) if decision is None else decision.scale_before
    grads = list(gradients_in(optimizer))
    if not grads:
        raise RuntimeError(
            "gradient_range found no gradient: call it after a scale_loss block, before step() and zero_grad(); or "
            "pass probe=2.0**8, and run an iteration in the context"
        )
    pairs = [(param, grad) for param, grad, _ in grads]
    _fill(found, pairs, scale, scale / 2.0 ** exponent_of(scale) / grads[0][2])  # all have one scale
