# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Block``: the work of one ``scale_loss`` block around the user's backward. ``BlockPart``: optional parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.optimizer_grads import (
    any_raised,
    clear_saturation,
    look_for_overflow,
    read_and_clear_saturation,
    separate,
    unscale,
)
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.scaler import LossScaler, StepDecision
from apex_npu.amp.session import Session
from apex_npu.amp.widened_grads import WidenedGrads
from apex_npu.backends._torch_private import disable_dynamo
from apex_npu.fusion import any_grads, drop_grads

_DEVICE_TYPE = attrgetter("device.type")
Work = list[tuple[AmpOptimizerState, list[GradGroup]]]
Delay = Literal["delay_unscale", "delay_overflow_check", "no_sync"]
# The stage in which a block leaves its optimizers.
STAGE_AFTER: dict[Delay | None, Stage] = {
    None: Stage.UNSCALED,
    "delay_unscale": Stage.DELAYED,
    "delay_overflow_check": Stage.UNSCALED,
    "no_sync": Stage.LOCAL,
}


class BlockPart:
    """A rarely needed part of a block. Each method is called at one point of the block; here it does nothing.

    The methods before and right after backward are called in the order of the block's parts. ``after_unscale`` is
    called in the opposite order.
    """

    def before_begin(self, block: Block) -> None:
        """Act before the existing gradients are brought to the loss scale."""

    def begun(self, block: Block, scaled_loss: Tensor) -> None:
        """Act after the existing gradients have been brought to the loss scale; backward of ``scaled_loss`` follows."""

    def before_unscale(self, block: Block) -> None:
        """Act after backward has ended."""

    def after_unscale(self, block: Block, found_inf: bool) -> bool:
        """Act after gradients are unscaled; return whether one is inf or NaN, given the result so far."""
        return found_inf

    def ended(self, block: Block) -> None:
        """Act after the decision about the next step."""

    def drops(self, block: Block, error: BaseException) -> bool:
        """Return True if no gradient can be kept after ``error`` has ended the backward."""
        return False

    def abandoned(self, block: Block) -> None:
        """Act after an exception, once the gradients are as they were before or unscaled."""


class Block:
    """A block: ``begin``, the user's backward, then ``end``, or ``abandon`` after an exception.

    Attributes:
        session: The session in which the block was opened.
        optimizers: The optimizers whose gradients backward computes.
        work: The state and the gradient groups of each optimizer; also as ``states`` and ``groups``.
        scaler: The scaler of the loss.
        parts: The additional parts of the block.
        scale: The factor of the loss.
        dynamic: The scale is dynamic, so that gradients are checked and the block waits for the device.
        before: ``id(state)`` → the stage before the block; READY if gradients were left unchecked.
        delay: The work that is left to a later block; None: nothing. See ``scale_loss``.
        unscales: The block unscales gradients.
        decides: The block decides about the next step.
        fuses: Gradients stay multiplied by the loss scale until the step.
    """

    delay: Delay | None = None
    unscales = True
    decides = True
    fuses = False

    def __init__(
        self, session: Session, optimizers: Sequence[Optimizer], work: Work, scaler: LossScaler, loss_id: int
    ) -> None:
        self.session, self.optimizers, self.work = session, optimizers, work
        self.scaler, self._loss_id = scaler, loss_id
        self.parts: Sequence[BlockPart] = ()
        self.states: list[AmpOptimizerState] = []
        self.groups: list[GradGroup] = []
        for state, groups in self.work:
            self.states.append(state)
            self.groups += groups
        self.scale, self.dynamic = scaler.scale, scaler.dynamic
        self.before: dict[int, Stage] = {}
        self._ending = self._unchecked = False

    def set_delay(self, delay: Delay) -> None:
        """Leave ``delay`` to a later block."""
        self.delay = delay
        self.unscales = delay != "delay_unscale"
        self.decides = False

    @disable_dynamo
    def begin(self, scaled_loss: Tensor) -> Tensor:
        """Multiply existing gradients by the loss scale, as the caller has done with the loss, and return the loss."""
        for part in self.parts:
            part.before_begin(self)
        for optimizer, (state, groups) in zip(self.optimizers, self.work, strict=True):
            if state.grads.scaled_by:
                state.drop_scaled_by_others(optimizer, groups)
        if len(self.groups) > 1:
            separate(self.groups)
        scaled: list[tuple[GradGroup, float]] = []
        try:
            for state, groups in self.work:
                factor = self.scale / state.grad_scale
                not_checked = state.stage is Stage.UNSCALED and state.grads.unchecked  # as by delay_overflow_check
                self.before[id(state)] = Stage.READY if not_checked else state.stage
                if state.decision is not None and state.decision.skip:
                    state.drop_overflowed()
                self._unchecked |= state.grads.unchecked
                for group in groups if state.stage in (Stage.DELAYED, Stage.LOCAL) else ():
                    group.drop_cleared()
                    group.note_delayed()  # a script may have scaled other gradients
                for group in groups:
                    if group.begin_block(factor, fuses=self.fuses):  # this block's end checks them, too
                        state.grads.unchecked = self._unchecked = True
                    scaled.append((group, 1.0 / factor))
            self._end_with(Stage.SCALED, self.scale)
        except Exception:
            for group, factor in scaled:
                group.abandon_block(factor, fuses=self.fuses)
            raise
        except BaseException:
            self.drop_all()  # an interrupt: only some are scaled
            raise
        for part in self.parts:
            part.begun(self, scaled_loss)
        return scaled_loss

    @disable_dynamo
    def end(self) -> None:
        """Unscale and check the gradients, and decide whether the next step is skipped."""
        self._ending = True
        for part in self.parts:
            part.before_unscale(self)
        found_inf = self._unscale()
        for part in reversed(self.parts):
            found_inf = part.after_unscale(self, found_inf)
        if self.decides:
            decide(self.states, self._loss_id, self.scaler, found_inf)
        for part in self.parts:
            part.ended(self)

    def _unscale(self) -> bool:
        """Bring unscaled gradients to the optimizers' parameters; return True if one of them is inf or NaN."""
        if self.delay is not None:
            if self.unscales:
                unscale(self.groups, self.scale, check=False)
            self._end_with(STAGE_AFTER[self.delay], 1.0 if self.unscales else self.scale)
            return False
        if self.session.open_checks:  # of blocks of other optimizers, nested in this one
            self.session.resolve_checks(self.scaler)
        check = self.dynamic
        if not check and self.scale != 1.0 and not self.scaler.said:
            # Static scale: check in order to warn, but only where the pass that divides can also check.
            check = set(map(_DEVICE_TYPE, self.groups)) <= {"cpu"}
        spare = self.session.spare_flags
        flags = unscale(self.groups, self.scale, check=check, spare=spare)
        if self._unchecked and self.dynamic:
            flags += look_for_overflow(self.groups)
        found_inf = any_raised(flags)
        if not found_inf:
            for flag in flags:
                spare[flag.device] = flag
        self._end_with(Stage.UNSCALED)
        return found_inf

    def _end_with(self, stage: Stage, grad_scale: float = 1.0) -> None:
        for state, groups in self.work:
            state.stage, state.grad_scale = stage, grad_scale
            if stage is Stage.UNSCALED and self.delay is None:
                state.grads.unchecked = False
            elif self.delay is not None and stage is not Stage.SCALED:
                state.grads.unchecked |= self.unscales
            for group in groups if stage is Stage.DELAYED else ():
                group.note_delayed()

    @disable_dynamo
    def abandon(self, error: BaseException) -> None:
        """After ``error`` in the block, drop the gradients of its backward, or unscale them with the earlier ones.

        Gradients of blocks with ``delay_unscale`` stay delayed, because they have not been checked.
        """
        drops = self._ending or any([part.drops(self, error) for part in self.parts])
        if self._drop_held() or drops:
            self.drop_all()  # only some are unscaled, or averages
            return
        for state, groups in self.work:
            if state.stage is not Stage.SCALED:
                continue
            if self.before.get(id(state)) is Stage.DELAYED:
                state.stage = Stage.DELAYED
                for group in groups:
                    group.note_delayed()
            else:
                self._abandon_state(state, groups)
        for part in self.parts:
            part.abandoned(self)

    def _drop_held(self) -> bool:
        """Drop the gradients that ``fully_shard`` units hold back from this and earlier blocks; True if any existed."""
        held = self.session.held
        return held is not None and held.drop({id(p) for p in self._stepped()})

    def _stepped(self) -> Iterable[Tensor]:
        return (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])

    def _abandon_state(self, state: AmpOptimizerState, groups: list[GradGroup]) -> None:
        for group in groups:
            group.abandon_block(1.0 / self.scale, fuses=False)
        state.grad_scale = 1.0
        self._end_abandoned(state)

    def _end_abandoned(self, state: AmpOptimizerState) -> None:
        """Set the stage to the one before the block: LOCAL, or UNSCALED where gradients were set aside; else READY."""
        before = self.before.get(id(state), Stage.READY)
        keeps = before is Stage.LOCAL or (before is Stage.UNSCALED and state.widens)
        state.stage = before if keeps else Stage.READY

    @disable_dynamo
    def drop_all(self) -> None:
        """Drop all gradients, for use when only some of them are unscaled."""
        for state, groups in self.work:
            for group in groups:
                drop_grads(group.params)
                group.forget(set_to_none=True)
            state.stage, state.grad_scale, state.has_local_grads = Stage.READY, 1.0, False
            if state.pending is not None:
                state.pending.clear()


class UnscaledBlock(Block):
    """A block at a static loss scale of 1, without masters: gradients stay as backward computes them."""

    def begin(self, scaled_loss: Tensor) -> Tensor:
        self._end_with(Stage.SCALED)
        return scaled_loss

    def _unscale(self) -> bool:
        held = self.session.held
        waits = held is not None and not set(map(id, held.params())).isdisjoint(map(id, self._stepped()))
        self._end_with(Stage.LOCAL if waits else Stage.UNSCALED)
        return False

    def abandon(self, error: BaseException) -> None:
        self._end_with(Stage.READY)
        if self._drop_held():
            drop_grads(list(self._stepped()))


class Captured(BlockPart):
    """A block in a CUDA graph that is being captured. Its step must be captured, too."""

    def ended(self, block: Block) -> None:
        for state in block.states:
            state.stage = Stage.CAPTURED


class Saturation(BlockPart):
    """A block on a device whose overflows give the largest finite number and raise a flag.

    The flag does not identify gradients, so each block reads it for its own gradients. ``OptimizerGrads.saturated``
    remembers the overflow until gradients are cleared, as an inf would on other devices. With nested blocks it is
    unknown which backward has raised the flag, so it also counts for the enclosing blocks.
    """

    def before_begin(self, block: Block) -> None:
        states = [optimizer._amp_state for optimizer in block.session.adopted]
        self._around = [state for state in states if state.stage is Stage.SCALED]  # of the blocks around this one
        for state, groups in block.work:
            grads = [p.grad for group in groups for p in group.params if p.grad is not None]
            keeps = not state.skip and any(bool(grad.count_nonzero()) for grad in grads)
            state.grads.saturated = state.grads.saturated and keeps
        if self._around:
            self._read_and_clear(block)
        else:
            clear_saturation(block.groups)

    def _read_and_clear(self, block: Block) -> bool:
        """Read and clear the flag, and record it for the enclosing blocks; True if numbers have saturated."""
        found = read_and_clear_saturation(block.groups)
        for state in self._around:
            state.grads.saturated |= found
        return found

    def before_unscale(self, block: Block) -> None:
        if block.dynamic and self._read_and_clear(block):
            for state in block.states:
                state.grads.saturated = True

    def after_unscale(self, block: Block, found_inf: bool) -> bool:
        if not block.dynamic:
            return found_inf
        for state in block.states:
            state.grads.saturated |= found_inf
        return block.decides and any(state.grads.saturated for state in block.states)

    def abandoned(self, block: Block) -> None:
        if block.dynamic and self._read_and_clear(block):
            for state, groups in block.work:
                # Backward adds to gradients that are not set aside.
                stay = state.stage is Stage.DELAYED or any(
                    not isinstance(group, WidenedGrads) and any_grads(group.params) for group in groups
                )
                state.grads.saturated = state.grads.saturated or stay


def decide(states: Iterable[AmpOptimizerState], loss_id: int, scaler: LossScaler, found_inf: bool) -> None:
    """Update the loss scale of ``scaler``, and mark the next steps of ``states`` as skipped if ``found_inf``."""
    before = scaler.scale
    try:
        scaler.update(found_inf)
    finally:  # the step must be skipped even if update warns, and warnings are errors
        decision = StepDecision(found_inf and scaler.dynamic, loss_id, before, scaler.scale)
        for state in states:
            if state.decision is None or not state.decision.skip:  # a decision to skip stands until the step
                state.decision = decision
