# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``bad_gradients``: finds the gradients of an optimizer that are not finite."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp import StepReport
from apex_npu.amp.inspect import gradients, parameter_names, policy, policy_of, stepped
from apex_npu.amp.policy import Policy
from apex_npu.debug.overflow.explain import watch_next_iteration
from apex_npu.debug.text import listed
from apex_npu.debug.watching.operators import count_bad, followed, gradient_values, is_finite, ranges_of
from apex_npu.ops import as_real

logger = logging.getLogger("apex_npu.amp")


def adopted_policy(optimizer: Optimizer, caller: str) -> Policy:
    """Return the policy of ``optimizer``; raise an error that names ``caller`` if amp does not manage it."""
    own, current = policy_of(optimizer), policy()
    if own is None:
        if current is not None and not current.enabled:
            raise RuntimeError(f"{caller} needs amp, but amp.initialize was called with enabled=False")
        raise RuntimeError(f"{type(optimizer).__name__} was not passed to amp.initialize, which {caller} needs")
    return own


def bad_gradients(optimizer: Optimizer) -> dict[str, tuple[int, int]]:
    """Return the gradients of ``optimizer`` that are not finite.

    Call it after a skipped step and before the gradients are cleared. It warns if there is no gradient at all, as after
    ``zero_grad``.

    Returns:
        A dict from the parameter's name to the numbers of its gradient's elements that are nan and inf.

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
    (optimizer,) = stepped(optimizer)
    adopted_policy(optimizer, "bad_gradients")
    counts, total = find_bad_gradients(optimizer)
    if not total:
        warnings.warn(
            "bad_gradients found no gradient: call it after backward, and before zero_grad() clears them", stacklevel=2
        )
    return counts


@torch.no_grad()
def find_bad_gradients(optimizer: Optimizer) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the numbers of nan and inf in each gradient that is not finite, and the number of all gradients."""
    present = list(gradients_in(optimizer))
    names = names_of([param for param, _, _ in present])
    grads = [grad for _, grad, _ in present]
    bad = [(name, g) for name, g, ends in zip(names, grads, ranges_of(grads), strict=True) if not is_finite(ends)]
    return {name: count_bad(grad) for name, grad in bad}, len(present)


def names_of(params: Sequence[Tensor]) -> list[str]:
    """Return the name of each parameter, by the models of the session, or by its shape; all names differ."""
    known = parameter_names()
    found: dict[str, None] = {}
    for param in params:
        name = known.get(param) or f"a parameter of shape {tuple(param.shape)}"
        found[name if name not in found else f"{name} ({len(found)})"] = None
    return list(found)


def gradients_in(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield those of ``amp.inspect.gradients`` whose elements can be read, as real tensors of this process's part."""
    for param, grad, scale in gradients(optimizer):
        values = None if grad is None else followed(gradient_values(grad))
        if values is not None:
            yield param, as_real(values) if values.is_complex() else values, scale


def explain_skip(optimizer: Optimizer, report: StepReport, alarms: bool, is_verbose: bool) -> None:
    """Log the bad gradients at the first of several skips in a row, and again where the row ``alarms``."""
    is_first = report.skips_in_a_row == 1 and is_verbose
    if not alarms and not is_first:
        return
    counts, total = find_bad_gradients(optimizer)
    name, bad = type(optimizer).__name__, list(counts)
    if is_first:
        which = f"{len(bad)} of {total} gradients ({listed(bad)}) were" if bad else "gradients were"
        logger.warning(
            "%s.step() was skipped: %s not finite at loss scale %g; normal while the scale settles",
            *(name, which, report.scale_before),
        )
    if alarms:
        if bad and len(bad) < total:
            where = f"the gradients of {listed(bad)} are not finite, and all others are, so look at these layers"
        elif bad:
            where = f"the gradients of all {total} parameters are not finite, so look at the loss itself"
        else:
            where = "the gradients are finite now; look at the loss itself"
        logger.error(
            "%s: %s steps in a row have been skipped, because gradients held inf or nan; the scale of loss %s is down "
            "to %s. In the last backward, %s. Possible causes: a logarithm, root or division at 0, a learning rate "
            "that has already ruined the weights, nan in the data. To find the operation, run an iteration in `with "
            "amp.debug.find_overflow(model) as found:`, and print(found)",
            *(name, report.skips_in_a_row, report.loss_id, report.scale_after, where),
        )
        watch_next_iteration()
