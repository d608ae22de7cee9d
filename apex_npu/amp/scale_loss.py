# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``with scale_loss(loss, optimizer) as scaled_loss``: the one place that orders scale, backward, unscale and skip."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu._extension import disable_dynamo
from apex_npu.amp.block_of_ranks import BlockOfRanks
from apex_npu.amp.capture import check_block
from apex_npu.amp.data_parallel import LocalGrads
from apex_npu.amp.delegated_skips import masks_steps
from apex_npu.amp.gradients import (
    GradUnit,
    any_raised,
    clear_overflow_flags,
    look_for_overflow,
    separate,
    unscale_units,
)
from apex_npu.amp.held_gradients import check_unshared, check_unwrapped, clip_held
from apex_npu.amp.open_check import OpenCheck
from apex_npu.amp.optimizer_adapter import pair_masters
from apex_npu.amp.optimizer_record import OptimizerRecord, inner_optimizer, record_of
from apex_npu.amp.scaler import LossScaler
from apex_npu.amp.session import Session, require
from apex_npu.amp.step_report import Verdict
from apex_npu.backends import for_device, is_capturing
from apex_npu.ops import LOW_PRECISION

Work = list[tuple[OptimizerRecord, list[GradUnit]]]
PutOff = Literal["delay_unscale", "delay_overflow_check"] | None


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield ``loss`` times the loss scale; then unscale the gradients and decide whether the step is to be skipped.

    Behind the block ``param.grad`` of every optimizer parameter, the fp32 masters' at O2, is the true gradient,
    accumulated over all blocks since it was last cleared; clip it, or look at it, then call ``optimizer.step()``. If a
    gradient was inf or nan, the scale shrinks and that ``step()`` does nothing. At most one wait for the device happens
    here, with a dynamic scale, and none with a static one. With ``fuse_unscale`` they stay scaled until ``step``, and
    whoever reads them first behind the block, clipping or ``step``, looks for overflow and waits. With a fused
    optimizer that is ``capturable`` nobody waits on a GPU: it skips the step by itself, and the next block, which needs
    the scale, or whoever asks before it, hears of that.

    An exception inside the block leaves gradients unscaled and everything usable. Gradients whose step will be skipped
    are zeroed at the next block, so that what it finds, and tells its scaler and its other optimizers, is its own.

    Under ``combine_ddp`` the gradients are averages over all processes when the block ends, and all of them call it
    equally often; with a dynamic scale it waits once more, for what they say. An exception on one ends the block on
    all, and drops their gradients.

    Args:
        loss: The loss, computed under the policy of ``initialize``.
        optimizers: Those whose parameters this loss's backward gives gradients to.
        loss_id: Which of the ``num_losses`` scalers to use.
        model: Not used; accepted as in Apex.
        delay_unscale: Leave the gradients scaled, for a following block that unscales their sum. Saves a pass when
            accumulating.
        delay_overflow_check: Unscale, but neither move the scale nor skip a step.

    Raises:
        RuntimeError: amp, or one of ``optimizers``, has not been initialized, or is in another such block already; a
            gradient is sparse; ``fuse_unscale`` cannot be done for these ``optimizers`` together; a CUDA graph is being
            captured, which could not repeat the block; another process has raised, or has another loss scale.
        TypeError: ``loss`` is no tensor, ``optimizers`` no optimizer.
        IndexError: ``loss_id`` is not below ``num_losses``.
    """
    session = require("amp.scale_loss")
    if not session.policy.enabled:
        yield loss
        return
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor, got {type(loss).__name__}")
    scaler = session.scaler(loss_id)
    scale = scaler.scale
    work = _prepare(optimizers, scaler, delays=delay_unscale or delay_overflow_check)
    if not loss.requires_grad:
        session.warn_once(
            "amp.scale_loss was given a loss that does not require grad: its backward() will fail, or reach no "
            "parameter. Was it computed under torch.no_grad(), or detached, or are all parameters frozen?",
            stacklevel=4,  # the with statement
        )
    hold = any(record.policy.fuse_unscale for record, _ in work)
    put_off: PutOff = "delay_unscale" if delay_unscale else "delay_overflow_check" if delay_overflow_check else None
    delivers = hold or not delay_unscale  # gradients reach masters in this block
    decides = put_off is None
    ranks = _join_ranks(session, work, optimizers, delivers=delivers, decides=decides and scaler.dynamic)
    try:
        _scale_up(work, scale, hold)
    except BaseException as error:
        if ranks.fail(error, scale, dynamic=scaler.dynamic):
            _drop_all(work)
        raise
    for record, _ in work:
        record.in_block = True
    try:
        yield (loss.float() if loss.dtype in LOW_PRECISION else loss) * scale
    except BaseException as error:
        if ranks.fail(error, scale, dynamic=scaler.dynamic):
            _drop_all(work)  # some are averages by now and some are not
        else:
            _take_back(work, scale, hold)
        raise
    finally:
        for record, _ in work:
            record.in_block = False
    # Held gradients are with the masters by now, beside those of this block.
    delayed = hold and any(record.unchecked == "delay_unscale" for record, _ in work)
    for record, _ in work:
        record.unchecked = put_off
    try:
        session.close_checks(scaler)  # of blocks inside this one, of other optimizers
        ranks.average_sources(scale, dynamic=scaler.dynamic)
        if not delivers:
            return
        may_wait = decides and scaler.dynamic and len(work) == 1 and ranks.is_alone and not _saturates(work)
        masks = may_wait and masks_steps(_listed(optimizers)[0])
        leaves_open = may_wait and (hold or masks)
        check = scaler.dynamic and decides and not (leaves_open and hold)
        flags = _unscale(work, 1.0 if hold else scale, check=check, share=hold and ranks.is_alone)
        units = [unit for _, part in work for unit in part]
        found_inf = not leaves_open and any_raised(flags)
        if check and delayed:
            found_inf |= any_raised(look_for_overflow(units))
        ranks.average_masters(scale, dynamic=scaler.dynamic)
        found_inf = ranks.agree(found_inf, scale)
    except BaseException:
        _drop_all(work)  # some are unscaled by now and some are not
        raise
    if leaves_open:
        # The session has the check until the next block, and shall not keep an optimizer that nobody else has.
        concerned = weakref.WeakSet(record for record, _ in work)
        left_open = OpenCheck(
            lambda: look_for_overflow(units), lambda found: _decide(concerned, loss_id, scaler, found), masks=masks
        )
        session.open_checks[scaler] = work[0][0].open_check = left_open
        if check:
            left_open.ask(*flags)
    elif decides:
        _decide([record for record, _ in work], loss_id, scaler, found_inf)


@disable_dynamo
def _join_ranks(session: Session, work: Work, optimizers: Any, *, delivers: bool, decides: bool) -> BlockOfRanks:
    """What the processes do together in this block."""
    records = [record for record, _ in work]
    parallels = {id(record.parallel): record.parallel for record in records}
    if len(parallels) > 1:
        raise RuntimeError(
            "the optimizers of one scale_loss block must come from one amp.initialize, where one of them averages "
            "gradients over processes (combine_ddp=True); open a block for each"
        )
    units = [unit for _, part in work for unit in part]
    parallel = records[0].parallel if records else None
    if parallel is None and any(record.policy.combine_ddp for record in records):
        raise RuntimeError(
            "an optimizer that was copied or loaded under combine_ddp=True does not know its process group any more; "
            "call amp.initialize before it is copied or loaded"
        )
    block = BlockOfRanks(records, units, decides=decides)
    if session.overflow_group is not None:
        block.agreeing.append(session.overflow_group)
    if parallel is not None:
        block.join(parallel, _listed(optimizers), local=session.no_sync_depth > 0, delivers=delivers)
    return block


def _listed(optimizers: Any) -> list[Optimizer]:
    optimizers = inner_optimizer(optimizers)
    return [inner_optimizer(o) for o in ([optimizers] if isinstance(optimizers, Optimizer) else optimizers)]


@disable_dynamo
def _prepare(optimizers: Any, scaler: LossScaler, *, delays: bool) -> Work:
    given = [optimizers] if isinstance(inner_optimizer(optimizers), Optimizer) else optimizers
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"optimizers must be an optimizer or a list of them, got {type(optimizers).__name__}")
    _check_holding(given)
    capturing = is_capturing()
    if capturing:
        check_block(_listed(optimizers), scaler, delays=delays)
    work: Work = []
    for optimizer in map(inner_optimizer, given):
        record = record_of(optimizer)
        if record is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} was not passed to amp.initialize; pass it there, and use what that returns"
            )
        if record.in_block:
            raise RuntimeError(
                "scale_loss blocks of one optimizer must not be nested: close the first one, or add up the losses"
            )
        record.captured_block = capturing
        pair_masters(optimizer)  # for parameters that have been unfrozen
        record.last_step()  # what the device alone knows of it, if the block before was another session's
        units = record.units(optimizer)
        if record.skip:
            _forget_skip_of_cleared(record, units)
        work.append((record, units))
    return _without_repeats(work)


def _check_holding(given: Sequence[Any]) -> None:
    """Refuse what cannot be right where gradients stay scaled behind the block."""
    records = [record for optimizer in given if (record := record_of(inner_optimizer(optimizer))) is not None]
    held = [record.policy.fuse_unscale for record in records]
    if not any(held):
        return
    if not all(held):
        raise RuntimeError(
            "scale_loss was given optimizers of two amp.initialize, one with fuse_unscale=True and one without: open a "
            "block for each of them"
        )
    for optimizer in given:
        check_unwrapped(optimizer)
    check_unshared(given)


def _forget_skip_of_cleared(record: OptimizerRecord, units: list[GradUnit]) -> None:
    for unit in units:
        unit.forget_cleared()
    if not any(unit.has_grads() for unit in units):
        record.verdict = None


def _without_repeats(work: Work) -> Work:
    """A parameter that several optimizers step has one gradient: to be unscaled once, and to be skipped by all."""
    if len(work) == 1:
        return work
    seen: dict[int, OptimizerRecord] = {}
    distinct: Work = []
    for record, units in work:
        kept = []
        for unit in units:
            fresh = [i for i, p in enumerate(unit.params) if id(p) not in seen]
            for p in unit.params:
                other = seen.setdefault(id(p), record)
                if record.skip or other.skip:
                    record.verdict = other.verdict = record.verdict if record.skip else other.verdict
            if len(fresh) == len(unit.params):
                kept.append(unit)
            elif fresh:
                kept.append(GradUnit([unit.params[i] for i in fresh], [unit.sources[i] for i in fresh]))
        distinct.append((record, kept))
    return distinct


@disable_dynamo
def _scale_up(work: Work, scale: float, hold: bool) -> None:
    """Bring the gradients that are there to ``scale``, so that like is added to like: by backward, or behind it."""
    # Not while gradients of an earlier backward wait to be checked: the flag may be about them.
    if all(record.grad_scale == 1.0 and record.unchecked is None for record, _ in work):
        clear_overflow_flags([unit for _, units in work for unit in units])
    separate([unit for _, units in work for unit in units])
    done: list[tuple[Callable[[float], None], float]] = []
    try:
        for record, units in work:
            if hold and record.grad_scale != 1.0:  # a script has scaled them by hand, and said so
                for unit in units:
                    unit.unscale_(record.held_scale / record.grad_scale, None)
                record.grad_scale = 1.0
            factor = scale / (record.held_scale if hold else record.grad_scale)
            delivered = hold or (record.grad_scale == 1.0 and record.unchecked != "delay_unscale")
            for unit in units:
                if delivered:
                    unit.forget_cleared()
                    unit.drop_source_grads()
                if record.skip:
                    unit.zero_()  # what is found inf behind this block shall be this block's
                multiply: Callable[[float], None] = unit.scale_params_ if hold else unit.scale_
                multiply(factor)
                done.append((multiply, 1.0 / factor))
    except BaseException:
        for multiply, factor in done:
            multiply(factor)
        raise
    for record, units in work:
        if hold:
            if record.skip:
                record.clip_coefficient = None  # of gradients that are zeros now; nan, maybe
            record.held_scale = scale
            clip_held(record, units)
        else:
            record.grad_scale = scale


@disable_dynamo
def _take_back(work: Work, scale: float, hold: bool) -> None:
    """After an exception in the block: what backward has left is dropped, or unscaled with what was there before."""
    for record, units in work:
        for unit in units:
            unit.drop_source_grads()
            if not hold:
                unit.scale_(1.0 / scale)
        record.grad_scale = 1.0


@disable_dynamo
def _drop_all(work: Work) -> None:
    for record, units in work:
        for unit in units:
            for tensor in (*unit.params, *unit.sources):
                tensor.grad = None
        record.grad_scale = record.held_scale = 1.0
        record.clip_coefficient = record.unchecked = None
        record.local_grads = LocalGrads.NONE


@disable_dynamo
def _unscale(work: Work, scale: float, *, check: bool, share: bool) -> list[Tensor]:
    units = [unit for _, units in work for unit in units]
    flags = unscale_units(units, scale, check=check, share=share)
    for record, _ in work:
        record.grad_scale = 1.0
    return flags


def _saturates(work: Work) -> bool:
    """Overflow shows in a flag of the device, which later work may raise, rather than in the gradients."""
    return any(for_device(unit.device).saturates() for _, units in work for unit in units)


def _decide(records: Iterable[OptimizerRecord], loss_id: int, scaler: LossScaler, found_inf: bool) -> None:
    before = scaler.scale
    try:
        scaler.update(found_inf)
    finally:  # it may warn, and a warning be an error: the step is to be skipped all the same
        verdict = Verdict(found_inf, loss_id, before, scaler.scale)
        for record in records:
            if not record.skip:
                record.verdict = verdict
