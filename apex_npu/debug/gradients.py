# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which gradients of an optimizer are not finite, found with few launches and one wait."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.optimizer_state import AmpOptimizerState, adopted_inside, inner_optimizer, state_of
from apex_npu.amp.session import Session, current
from apex_npu.amp.step_decision import StepReport, explain_skips
from apex_npu.debug.overflow.explain import watch_next_iteration
from apex_npu.debug.text import listed
from apex_npu.fusion import FlatGrads
from apex_npu.fusion.grad_slots import IN_BUFFER
from apex_npu.fusion.shards import local_part
from apex_npu.ops import Segments, as_real, segment_dot

logger = logging.getLogger("apex_npu.amp")


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


@dataclass(frozen=True)
class BadGradients:
    """The gradients of an optimizer that are not finite.

    Attributes:
        counts: Name of the parameter → how many elements are nan, and how many inf.
        total: How many gradients there are.
    """

    counts: dict[str, tuple[int, int]]
    total: int


@torch.no_grad()
def find_bad_gradients(session: Session | None, optimizer: Optimizer, state: AmpOptimizerState) -> BadGradients:
    """Look at the gradients as backward, or the last block, has left them. Waits for the device."""
    name_of = names_of(session)
    total = 0
    counts: dict[str, tuple[int, int]] = {}
    for group in state.grad_groups(optimizer):
        present = list(gradients_in(group))
        total += len(present)
        for (i, _), (nans, infs) in zip(present, _counts(group.flat, present), strict=True):
            if nans or infs:
                name = name_of(group.sources[i])
                counts[name if name not in counts else f"{name} ({len(counts)})"] = (nans, infs)
    return BadGradients(counts, total)


def names_of(session: Session | None) -> Callable[[Tensor], str]:
    """What names a parameter: by the models of ``session``, or by its shape."""
    names = {} if session is None else session.parameter_names()
    return lambda param: names.get(param) or f"a parameter of shape {tuple(param.shape)}"


def gradients_in(group: GradGroup) -> Iterator[tuple[int, Tensor]]:
    """Indices and gradients, those of the model where masters have none."""
    for i, (param, source) in enumerate(zip(group.params, group.sources, strict=True)):
        grad = source.grad if param.grad is None else param.grad
        if grad is not None and grad.layout == torch.strided and grad.numel():
            yield i, as_real(grad) if grad.is_complex() else local_part(grad)


def _counts(flat: FlatGrads | None, present: Sequence[tuple[int, Tensor]]) -> list[tuple[int, int]]:
    """How many elements of each gradient are nan, and inf."""
    if not present:
        return []
    # Where masters have no gradients, and the model's are looked at, these are in no buffer.
    on_buffer = flat is not None and flat.dtype == torch.float32 and flat.has_buffer
    if flat is not None and on_buffer and all(flat.states()[i] == IN_BUFFER for i, _ in present):
        return _counts_in_buffer(flat, [i for i, _ in present])
    grads = [grad for _, grad in present]
    norms: list[float] = torch.stack(torch._foreach_norm(grads)).tolist()
    # A sum of squares overflows earlier than its terms.
    suspects = [grad for grad, norm in zip(grads, norms, strict=True) if not math.isfinite(norm)]
    sums = [count for grad in suspects for count in (grad.isnan().sum(), grad.isinf().sum())]
    numbers = iter(torch.stack(sums).tolist() if sums else [])
    return [(0, 0) if math.isfinite(norm) else (next(numbers), next(numbers)) for norm in norms]


def _counts_in_buffer(flat: FlatGrads, slots: Sequence[int]) -> list[tuple[int, int]]:
    lengths = [flat.params[i].numel() for i in slots]
    segments = Segments.of([flat.offsets[i] for i in slots], lengths, flat.flat.numel(), flat.device)

    def sums_of(x: Tensor) -> list[float]:
        found: list[float] = segment_dot(x, x, *segments).tolist()
        return found

    if all(map(math.isfinite, sums_of(flat.flat))):
        return [(0, 0)] * len(slots)
    nans, infs = sums_of(flat.flat.isnan().float()), sums_of(flat.flat.isinf().float())
    return [(int(nan), int(inf)) for nan, inf in zip(nans, infs, strict=True)]


def _describe(report: StepReport, optimizer: Optimizer, bad: BadGradients) -> str:
    """What the first skip of a row was for."""
    which = (
        f"{len(bad.counts)} of {bad.total} gradients ({listed(list(bad.counts))}) were"
        if bad.counts
        else "gradients were"
    )
    return (
        f"{type(optimizer).__name__}.step() was skipped: {which} not finite at loss scale {report.scale_before:g}; "
        "normal while the scale settles"
    )


def explain_skip(session: Session, optimizer: Optimizer, state: AmpOptimizerState, report: StepReport) -> None:
    """Name the gradients once in a row of skips, and again where the row is long."""
    alarms = report.skips_in_a_row == session.skip_alarm
    if not alarms and (report.skips_in_a_row > 1 or session.verbosity < 1):
        return
    bad = find_bad_gradients(session, optimizer, state)
    if report.skips_in_a_row == 1 and session.verbosity > 0:
        logger.warning("%s", _describe(report, optimizer, bad))
    if alarms:
        logger.error("%s: %s", type(optimizer).__name__, explain_skips(report, list(bad.counts), bad.total))
        watch_next_iteration()
