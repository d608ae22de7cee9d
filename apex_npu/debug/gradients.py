# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``bad_gradients``: finds the gradients of an optimizer that are not finite, with few launches."""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp import StepReport
from apex_npu.amp.inspect import gradients, parameter_names, policy, policy_of, stepped
from apex_npu.amp.policy import Policy
from apex_npu.debug.overflow.explain import watch_next_iteration
from apex_npu.debug.text import listed
from apex_npu.fusion.shards import local_part
from apex_npu.ops import Segments, as_real, segment_dot

logger = logging.getLogger("apex_npu.amp")

# Approximately how many elements are joined: joining all would take memory that training needs.
_BATCH = 1 << 24


def adopted_policy(optimizer: Optimizer, caller: str) -> Policy:
    """Return the policy of ``optimizer``.

    Raises:
        RuntimeError: ``optimizer`` was not passed to ``amp.initialize``, or ``enabled=False`` was; the message names
            ``caller``.
    """
    own, current = policy_of(optimizer), policy()
    if own is None:
        if current is not None and not current.enabled:
            raise RuntimeError(f"{caller} needs amp, but amp.initialize was called with enabled=False")
        raise RuntimeError(f"{type(optimizer).__name__} was not passed to amp.initialize, which {caller} needs")
    return own


def bad_gradients(optimizer: Optimizer) -> dict[str, tuple[int, int]]:
    """Return the gradients of ``optimizer`` that are not finite.

    Call it after a skipped step and before the gradients are cleared. It takes few launches, and copies some of the
    gradients at a time. It warns if there is no gradient at all, as after ``zero_grad``.

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
    """Find the gradients that are not finite, as backward or the last block has left them; waits for the device.

    Returns:
        A dict from the parameter's name to the numbers of elements that are nan and inf, and the number of gradients.
    """
    name_of = names_of()
    present = list(gradients_in(optimizer))
    counts: dict[str, tuple[int, int]] = {}
    for (param, _, _), (nans, infs) in zip(present, _counts([grad for _, grad, _ in present]), strict=True):
        if nans or infs:
            name = name_of(param)
            counts[name if name not in counts else f"{name} ({len(counts)})"] = (nans, infs)
    return counts, len(present)


def names_of() -> Callable[[Tensor], str]:
    """Return a function that names a parameter: by the models of the session, or by its shape."""
    names = parameter_names()
    return lambda param: names.get(param) or f"a parameter of shape {tuple(param.shape)}"


def gradients_in(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield those of ``amp.inspect.gradients`` whose elements can be read, as real tensors of this process's part."""
    for param, grad, scale in gradients(optimizer):
        if grad is not None and grad.layout == torch.strided and grad.numel():
            yield param, as_real(grad) if grad.is_complex() else local_part(grad), scale


def _counts(grads: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Count the elements of each gradient that are nan and inf; gradients are joined to take few launches."""
    batches: dict[Any, list[int]] = {}
    elements: Counter[Any] = Counter()
    for i, grad in enumerate(grads):
        kind = grad.device, grad.dtype
        batches.setdefault((kind, elements[kind] // _BATCH), []).append(i)
        elements[kind] += grad.numel()
    found: dict[int, tuple[int, int]] = {}
    for batch in batches.values():
        joined = torch.cat([grads[i].reshape(-1) for i in batch])
        lengths = [grads[i].numel() for i in batch]
        segments = Segments.of([0, *accumulate(lengths[:-1])], lengths, joined.numel(), joined.device)
        if not math.isfinite(joined.norm()):  # a sum of squares overflows earlier than its terms
            sums = zip(_sums_of(joined.isnan(), segments), _sums_of(joined.isinf(), segments), strict=True)
            found.update(zip(batch, ((int(nans), int(infs)) for nans, infs in sums), strict=True))
    return [found.get(i, (0, 0)) for i in range(len(grads))]


def _sums_of(flags: Tensor, segments: Segments) -> list[float]:
    """Count the set elements of ``flags`` in each segment."""
    ones = flags.float()
    sums: list[float] = segment_dot(ones, ones, *segments).tolist()
    return sums


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
        logger.error("%s: %s", name, _explain_skips(report, bad, total))
        watch_next_iteration()


def _explain_skips(report: StepReport, bad: Sequence[str], total: int) -> str:
    """Return advice after many skipped steps; in the last one, ``bad`` of ``total`` gradients were not finite."""
    if bad and len(bad) < total:
        where = f"the gradients of {listed(bad)} are not finite, and all others are, so look at these layers"
    elif bad:
        where = f"the gradients of all {total} parameters are not finite, so look at the loss itself"
    else:
        where = "the gradients are finite now; look at the loss itself"
    return (
        f"{report.skips_in_a_row} steps in a row have been skipped, because gradients held inf or nan; the scale of "
        f"loss {report.loss_id} is down to {report.scale_after}. In the last backward, {where}. Possible causes: a "
        "logarithm, root or division at 0, a learning rate that has already ruined the weights, nan in the data. "
        "To find the operation, run an iteration in `with amp.debug.find_overflow(model) as found:`, and "
        "print(found)"
    )
