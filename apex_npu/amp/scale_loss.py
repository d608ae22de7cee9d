# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``with scale_loss(loss, optimizer) as scaled_loss``: the one place that orders scale, backward, unscale and skip."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu._cli import hooks
from apex_npu.amp.accessors import OptimizerAccessors
from apex_npu.amp.block import Block, BlockPart, Captured, Delay, Saturation, UnscaledBlock, Work
from apex_npu.amp.capture import check_block
from apex_npu.amp.fused_unscale import DeferringBlock
from apex_npu.amp.grad_sync import Agreement, BucketViews, UnknownAverages
from apex_npu.amp.loss_graph import FirstLook, LaterLook, Reaching, warn_of_dtypes
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage, stepped
from apex_npu.amp.preconditions import check_fusible
from apex_npu.amp.session import Session, require, settings
from apex_npu.amp.sharding import HeldBack
from apex_npu.backends import is_capturing
from apex_npu.backends._torch_private import disable_dynamo, torch_profiler
from apex_npu.distributed.torch_ddp import ddps_of, looking_at_all, may_keep_grads, with_bucket_views
from apex_npu.fusion.shards import groups_over
from apex_npu.ops import LOW_PRECISION

CONSTANT_LOSS = (
    "amp.scale_loss was given a loss that does not require grad: its backward() will fail, or reach no parameter. Was "
    "it computed under torch.no_grad(), or detached, or are all parameters frozen?"
)


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield ``loss`` times the loss scale; then unscale the gradients and decide whether to skip the step.

    After the block ``param.grad`` of every optimizer parameter is the unscaled gradient, at O2 and O5 in float32. It is
    accumulated over all blocks since it was last cleared. Clip or read it, then call ``optimizer.step()``. If a
    gradient is inf or NaN, the scale shrinks and that ``step()`` does nothing.

    With a dynamic scale the host waits for the device at most once in the block; with a static one it does not wait.
    With ``fuse_unscale`` gradients stay scaled until ``step``, and the overflow check runs, and waits, when clipping or
    ``step`` first reads them. With a fused optimizer that is ``capturable`` a GPU skips the step without a wait, and
    the host reads ``found_inf`` at the next block, or when the scale is read.

    After an exception inside the block amp is usable. At O2 and O5, 16-bit parameters have their gradients from before
    the block; gradients of float32 parameters, and those left by ``delay_unscale``, also have what the backward has
    added. They are unscaled, except with ``fuse_unscale`` and ``delay_unscale``, and remain to be checked then. For
    models sharded by ``fully_shard``, an exception drops all gradients if it ends a backward early, or if gradients are
    held back for accumulation. The next block zeroes gradients whose step will be skipped, so that their overflow does
    not affect its scaler and other optimizers.

    With ``combine_ddp`` the gradients are averages over all processes when the block ends. All processes must enter
    equally many blocks. With a dynamic scale the block waits once more, for the other processes. An exception on one
    process ends the block on all and drops their gradients.

    Args:
        loss: The loss, computed under the policy of ``initialize``.
        optimizers: The optimizers whose parameters get gradients from this loss.
        loss_id: Which of the ``num_losses`` scalers to use.
        model: Not used; accepted as in Apex.
        delay_unscale: Leave the gradients scaled, for a later block that unscales their sum. Saves a pass when
            accumulating. At O2 and O5 this is automatic for a block whose gradients DistributedDataParallel
            does not average, as in its ``no_sync``.
        delay_overflow_check: Unscale, but neither change the scale nor skip a step.

    Raises:
        RuntimeError: amp, or one of ``optimizers``, has not been initialized or is already in another such block. A
            gradient of an optimizer with flat buffers is sparse. ``fuse_unscale`` is not possible for these
            ``optimizers`` together. A CUDA graph is being captured that cannot repeat the block. Another process has
            raised, or has another loss scale.
        TypeError: ``loss`` is not a tensor, or ``optimizers`` are not optimizers.
        IndexError: ``loss_id`` is not below ``num_losses``.

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> with amp.scale_loss(loss_fn(model(input), target), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
    """
    session = require("amp.scale_loss")
    if not session.policy.enabled:
        yield loss
        return
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor, got {type(loss).__name__}")
    if torch_profiler._is_profiler_enabled is (settings.labels is None):  # on without ranges, or off with them
        hooks.profiler_changed()
    delay: Delay | None = "delay_unscale" if delay_unscale else "delay_overflow_check" if delay_overflow_check else None
    block = _open_block(session, loss, optimizers, loss_id, delay)
    if not loss.requires_grad:
        session.warn_once(block.scaler, CONSTANT_LOSS)
    dynamic = block.dynamic
    labels = settings.labels  # another thread may drop them
    if labels is not None:
        block = labels.around(block)
    observers = session.observers
    try:
        for observer in observers:
            observer.block_begins(loss, optimizers, loss_id, block.scale, dynamic)
        # A reference here would keep the scaled loss, and the hooks that a script adds to it, alive.
        yield block.begin((loss.float() if loss.dtype in LOW_PRECISION else loss) * block.scale)
        for observer in observers:
            observer.backward_ended()
        block.end()
    except BaseException as error:
        block.abandon(error)
        raise
    finally:
        for observer in observers:
            observer.block_ended()


@disable_dynamo
def _open_block(session: Session, loss: Tensor, optimizers: Any, loss_id: int, delay: Delay | None) -> Block:
    """Make the block for ``optimizers``: an ordinary one, unless they or the session need a special one."""
    scaler = session.scaler(loss_id)
    listed = [optimizers] if isinstance(optimizers, OptimizerAccessors) else _listed(optimizers)
    capturing = (torch.cuda.is_initialized() or "torch_npu" in sys.modules) and is_capturing()
    if capturing:
        check_block(listed, scaler, delays=delay is not None)
    ordinary = delay is None and session.overflow_group is None
    unscaled = scaler.scale == 1.0 and not scaler.dynamic
    states = []
    for optimizer in listed:
        state: AmpOptimizerState | None = getattr(optimizer, "_amp_state", None)
        if state is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} was not passed to amp.initialize; pass it there, and use the returned one"
            )
        if state.stage is Stage.SCALED or state.masters.own_values or state.masters.retired:
            _check_begins(optimizer, state)
        if state.report is None:
            warn_of_dtypes(session, optimizer, state)
        ordinary = ordinary and state.pending is None and state.parallel is None and not state.policy.combine_ddp
        unscaled = unscaled and state.is_unscaled
        states.append(state)
    if ordinary and unscaled and not capturing:
        return UnscaledBlock(session, listed, [(state, []) for state in states], scaler, loss_id)
    work: Work = []
    for optimizer, state in zip(listed, states, strict=True):
        if state.masters.find_new(optimizer) or optimizer not in session.adopted:
            session.register(optimizer, state)
        work.append((state, state.grads.groups_of(optimizer)))
        ordinary = ordinary and state.report is not None and not (state.grads.saturates or state.grads.meshes)
    if len(work) > 1:
        work = _without_repeats(work)
    ordinary = ordinary and not (capturing or session.ddps or session.reached)
    if len(session.adopted) > len(states):
        ordinary = ordinary and not _others_wait(session, states)
    if ordinary:
        return Block(session, listed, work, scaler, loss_id)
    for state in states:
        state.resolve()  # open results of earlier blocks, including those of another session
    _check_fusing(optimizers, states)
    _check_parallel(states)
    deferring = any(state.pending is not None for state in states)
    block = (DeferringBlock if deferring else Block)(session, listed, work, scaler, loss_id)
    _make_special(block, loss, delay)
    return block


def _listed(optimizers: Any) -> list[Optimizer]:
    listed = stepped(optimizers)
    if not isinstance(optimizers, (list, tuple)) and not isinstance(listed[0], Optimizer):
        raise TypeError(f"optimizers must be an optimizer or a list of them, got {type(optimizers).__name__}")
    return listed


def _check_begins(optimizer: Optimizer, state: AmpOptimizerState) -> None:
    """Raise if no block of ``optimizer`` may begin now; before its first block, make masters equal on all processes."""
    if state.masters.own_values:
        state.forget_own_values()
    state.check_has_model(optimizer, "amp.scale_loss")
    if state.stage is Stage.SCALED:
        raise RuntimeError(
            "scale_loss blocks of one optimizer must not be nested: close the first one, or add up the losses"
        )


def _make_special(block: Block, loss: Tensor, delay: Delay | None) -> None:
    """Give ``block`` the parts it needs for the rare cases."""
    session, states = block.session, block.states
    synced = any(state.parallel is not None for state in states)
    params = [p for group in block.groups for p in group.params] if session.ddps else []
    ddps = [] if synced else ddps_of(may_keep_grads(session.ddps), params)
    if ddps and is_capturing() and any(state.widens for state in states):
        check_block(block.optimizers, block.scaler, delays=True)
    if delay is None and synced and session.no_sync_depth and any(state.widens for state in states):
        delay = "delay_unscale"  # gradients of one process must not be added to averages
    if delay is not None:
        block.set_delay(delay)
    parts: list[BlockPart] = []
    if any(state.report is None for state in states):
        parts.append(FirstLook(loss))
    elif _others_wait(session, states):  # which a loss may have begun to reach
        parts.append(LaterLook(loss))
    if parts or session.reached or looking_at_all(session.ddps):
        parts.append(Reaching())
    if ddps:
        parts.append(UnknownAverages(ddps))
    if session.ddps or synced:
        for group in block.groups:
            group.casts_in_backward = True  # reducers accept only gradients of the parameter's dtype
    views = ddps_of(with_bucket_views(session.ddps), params)
    if views:
        parts.append(BucketViews(views))
    meshes = list(dict.fromkeys(mesh for state in states for mesh in state.grads.meshes))
    held = session.held if meshes and not ddps else None
    if held is not None:
        parts.append(HeldBack(held))
    # ``overflow_group`` must include the processes of the meshes.
    given = session.overflow_group
    deciding = [(given(), None)] if given is not None else groups_over(meshes) if block.dynamic else []
    if deciding or synced:
        parts.append(Agreement(block, deciding))
    saturating = any(state.grads.saturates for state in states)
    if saturating:
        parts.append(Saturation())
    if is_capturing():
        parts.append(Captured())
    if isinstance(block, DeferringBlock):
        block.may_defer = not (saturating or deciding or synced)
    block.parts = parts


def _others_wait(session: Session, states: Sequence[AmpOptimizerState]) -> bool:
    """Return True if an optimizer that ``states`` do not have waits for a step."""
    others = (optimizer._amp_state for optimizer in session.adopted)
    return any(other.waits and other not in states for other in others)


def _check_fusing(given: Any, states: Sequence[AmpOptimizerState]) -> None:
    """Raise if the given optimizers cannot work with gradients that stay scaled after the block."""
    fuses = [state.policy.fuse_unscale for state in states]
    if not any(fuses):
        return
    if not all(fuses):
        raise RuntimeError(
            "scale_loss was given optimizers of two amp.initialize, one with fuse_unscale=True and one without: open a "
            "block for each of them"
        )
    check_fusible(given)


def _check_parallel(states: Sequence[AmpOptimizerState]) -> None:
    if len({id(state.parallel) for state in states}) > 1:
        raise RuntimeError(
            "the optimizers of one scale_loss block must come from one amp.initialize if one of them averages "
            "gradients over processes (combine_ddp=True); open a block for each"
        )
    if any(state.parallel is None and state.policy.combine_ddp for state in states):
        raise RuntimeError(
            "an optimizer that was copied or loaded under combine_ddp=True has lost its process group; "
            "call amp.initialize before it is copied or loaded"
        )


def _without_repeats(work: Work) -> Work:
    """Remove repeated parameters. A gradient that optimizers share is unscaled once, and all skip its step."""
    seen: dict[int, AmpOptimizerState] = {}
    distinct: Work = []
    for state, groups in work:
        kept = []
        for group in groups:
            fresh = [i for i, p in enumerate(group.params) if id(p) not in seen]
            for p in group.params:
                other = seen.setdefault(id(p), state)
                if state.skip or other.skip:
                    state.decision = other.decision = state.decision if state.skip else other.decision
            if len(fresh) == len(group.params):
                kept.append(group)
            elif fresh:
                kept.append(group.part(fresh))
        distinct.append((state, kept))
    return distinct
