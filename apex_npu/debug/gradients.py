# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``bad_gradients``: which gradients of an optimizer are not finite."""

from __future__ import annotations

import warnings

from torch.optim import Optimizer

from apex_npu.amp.bad_gradients import find_bad_gradients
from apex_npu.amp.optimizer_state import AmpOptimizerState, adopted_inside, inner_optimizer, state_of
from apex_npu.amp.session import current


def adopted_state(optimizer: Optimizer, caller: str) -> AmpOptimizerState:
    """Amp's state of ``optimizer``.

    Raises:
        RuntimeError: It was not passed to ``amp.initialize``, or with ``enabled=False``; the message names ``caller``.
    """
    state = state_of(optimizer)
    if state is None:
        session, name = current(), type(optimizer).__name__
        if session is not None and not session.policy.enabled:
            raise RuntimeError(f"{caller} needs amp, which amp.initialize was called without: enabled=False")
        raise RuntimeError(f"{name} was not passed to amp.initialize, which {caller} needs")
    return state


def bad_gradients(optimizer: Optimizer) -> dict[str, tuple[int, int]]:
    """The gradients of ``optimizer`` that are not finite, after a skipped step until they are cleared.

    Takes few launches and one wait, one more for each gradient that is not finite. Where there is no gradient at all,
    as after ``zero_grad``, it warns.

    Returns:
        Name of the parameter → how many of its gradient's elements are nan, and how many are inf.

    Raises:
        RuntimeError: ``optimizer`` was not passed to ``amp.initialize``.

    Example::

        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic")
        >>> with amp.scale_loss(model(input).sum() * float("inf"), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> sorted(amp.debug.bad_gradients(optimizer))
        ['bias', 'weight']
    """
    optimizer = inner_optimizer(adopted_inside(optimizer))
    state = adopted_state(optimizer, "bad_gradients")
    bad = find_bad_gradients(current(), optimizer, state)
    if not bad.total:
        warnings.warn(
            "bad_gradients found no gradient: call it after backward, and before zero_grad() clears them", stacklevel=2
        )
    return bad.counts
