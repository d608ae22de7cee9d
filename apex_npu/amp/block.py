# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Block``: what one ``scale_loss`` block does around the user's backward; ``BlockPart``: what else may be done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.grad_groups import GradGroup, any_raised, look_for_overflow, separate, unscale
from apex_npu.amp.optimizer_state import OF_OTHER_BLOCKS, AmpOptimizerState, Stage
from apex_npu.amp.saturation import clear_saturation, read_and_clear_saturation
from apex_npu.amp.scaler import LossScaler
from apex_npu.amp.session import Session
from apex_npu.amp.step_decision import StepDecision
from apex_npu.backends._torch_private import disable_dynamo
from apex_npu.fusion import drop_grads

_DEVICE_TYPE = attrgetter("device.type")
Work = list[tuple[AmpOptimizerState, list[GradGroup]]]
Delay = Literal["delay_unscale", "delay_overflow_check", "no_sync"]
# The stage in which a block leaves its optimizers.
STAGE_AFTER: dict[Delay | None, Stage] = {
    None: Stage.UNSCALED,
    "delay_unscale": Stage.DELAYED,
    "delay_overflow_check": Stage.UNCHECKED,
    "no_sync": Stage.LOCAL,
}


class BlockArgs(NamedTuple):
    """What a block is made for: see ``Block``, and ``scale_loss`` for ``loss_id``."""

    session: Session
    optimizers: Sequence[Optimizer]
    work: Work
    scaler: LossScaler
    loss_id: int


class BlockPart:
    """What is rare and done around a block: each method is a place where a part may act, and does nothing by itself.

    Those before backward, and right after it, are called in the order of the block's parts, those after unscaling in
    the opposite order.
    """

    def before_begin(self, block: Block) -> None:
        """The gradients that are there are about to be brought to the loss scale."""

    def begun(self, block: Block) -> None:
        """They have been: backward follows."""

    def multiplied(self, block: Block, scaled_loss: Tensor) -> None:
        """Of ``scaled_loss``, which the user gets."""

    def before_unscale(self, block: Block) -> None:
        """Backward has ended."""

    def after_unscale(self, block: Block, found_inf: bool) -> bool:
        """Gradients are unscaled; whether one is inf or NaN, as far as is known with and without this part."""
        return found_inf

    def ended(self, block: Block) -> None:
        """What follows for the step has been decided."""

    def drops(self, block: Block, error: BaseException) -> bool:
        """``error`` has ended backward; True: of the gradients none can be kept."""
        return False

    def abandoned(self, block: Block) -> None:
        """It has, and gradients are as they were, or unscaled."""


class Block:
    """A block: ``begin``, the user's backward, then ``end``, or ``abandon`` after an exception.

    Attributes:
        optimizers: Those whose gradients backward computes.
        work: Their states, and how their gradients get to them; also as ``states`` and ``groups``.
        parts: What is done besides.
        scale: What the loss is multiplied with.
        dynamic: The scale is dynamic, so that gradients are checked, and the block waits for the device.
        waited: The stage that optimizers had whose gradients wait for a later block, by the identity of their state.
    """

    # Whether gradients reach masters in this block, and whether it decides about the next step.
    copies_grads = True
    decides = True

    def __init__(self, args: BlockArgs, parts: Sequence[BlockPart] = ()) -> None:
        self._session, self.optimizers, self.work, self._scaler, self._loss_id = args
        self.parts = parts
        self.states: list[AmpOptimizerState] = []
        self.groups: list[GradGroup] = []
        for state, groups in self.work:
            self.states.append(state)
            self.groups += groups
        self.scale, self.dynamic = self._scaler.scale, self._scaler.dynamic
        self.waited: dict[int, Stage] = {}
        self._ending = self._unchecked = False

    @disable_dynamo
    def begin(self) -> None:
        """Bring the gradients that are there to the loss scale, so that backward adds like to like."""
        for part in self.parts:
            part.before_begin(self)
        if len(self.groups) > 1:
            separate(self.groups)
        scaled: list[tuple[GradGroup, float]] = []
        try:
            for state, groups in self.work:
                factor = self.scale / state.grad_scale
                if state.decision is not None and state.decision.skip:
                    state.drop_overflowed()
                self._unchecked |= state.grads.unchecked
                if state.stage in (Stage.DELAYED, Stage.LOCAL):
                    self._begin_delayed(state, groups)
                for group in groups:
                    if self._begin_group(group, factor):
                        self._keep(state, group)
                    scaled.append((group, 1.0 / factor))
            self._end_with(Stage.SCALED, self.scale)
        except Exception:
            for group, factor in scaled:
                self._abandon_group(group, factor)
            raise
        except BaseException:
            self.drop_all()  # an interrupt: some are scaled by now and some are not
            raise
        for part in self.parts:
            part.begun(self)

    def multiplied(self, scaled_loss: Tensor) -> Tensor:
        """``scaled_loss``, of which the parts are told."""
        for part in self.parts:
            part.multiplied(self, scaled_loss)
        return scaled_loss

    def _begin_group(self, group: GradGroup, factor: float) -> bool:
        return group.begin_block(factor)

    def _keep(self, state: AmpOptimizerState, group: GradGroup) -> None:
        """Backward has left gradients outside of blocks: they are added to masters when this one ends, and checked."""
        if state.grads.scaled_by:
            group.edited = OF_OTHER_BLOCKS
            group.drop_kept()
        else:
            state.grads.unchecked = self._unchecked = True

    def _abandon_group(self, group: GradGroup, factor: float) -> None:
        group.abandon_block(factor)

    @disable_dynamo
    def end(self) -> None:
        """Unscale and check the gradients, and decide about the next step."""
        self._ending = True
        for part in self.parts:
            part.before_unscale(self)
        found_inf = self._unscale()
        for part in reversed(self.parts):
            found_inf = part.after_unscale(self, found_inf)
        if self.decides:
            decide(self.states, self._loss_id, self._scaler, found_inf)
        for part in self.parts:
            part.ended(self)

    def _unscale(self) -> bool:
        """Bring gradients to the optimizers' parameters, unscaled; True: one of them is inf or NaN."""
        if self._session.open_checks:  # of blocks inside of this one, of other optimizers
            self._session.resolve_checks(self._scaler)
        check = self.dynamic
        if not check and self.scale != 1.0 and not self._scaler.said:
            # Under a static scale: to warn, where the pass that divides looks for overflow, too.
            check = set(map(_DEVICE_TYPE, self.groups)) <= {"cpu"}
        spare = self._session.spare_flags
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
        for state in self.states:
            state.stage, state.grad_scale = stage, grad_scale
            if stage is Stage.UNSCALED:
                state.grads.unchecked = False

    def _begin_delayed(self, state: AmpOptimizerState, groups: list[GradGroup]) -> None:
        self.waited[id(state)] = state.stage
        for group in groups:
            edited = group.edited
            group.drop_cleared()
            group.note_delayed()  # a script may have scaled others
            group.edited = edited

    @staticmethod
    def _leave_delayed(state: AmpOptimizerState, groups: list[GradGroup]) -> None:
        state.stage = Stage.DELAYED
        for group in groups:
            group.note_delayed()

    @disable_dynamo
    def abandon(self, error: BaseException) -> None:
        """After ``error`` in the block: drop what backward has left, or unscale it with what was there before.

        What blocks with ``delay_unscale`` have left stays delayed: it has not been checked.
        """
        drops = self._ending or any([part.drops(self, error) for part in self.parts])
        if self._drop_held() or drops:
            self.drop_all()  # some are unscaled, or averages, by now and some are not
            return
        for state, groups in self.work:
            if state.stage is not Stage.SCALED:
                continue
            if self.waited.get(id(state)) is Stage.DELAYED:
                self._leave_delayed(state, groups)
            else:
                self._abandon_state(state, groups)
        for part in self.parts:
            part.abandoned(self)

    def _drop_held(self) -> bool:
        """Drop what units of ``fully_shard`` hold back, of this block and those before; whether that was anything."""
        held = self._session.held
        return held is not None and held.drop({id(p) for p in self._stepped()})

    def _stepped(self) -> Iterable[Tensor]:
        return (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])

    def _abandon_state(self, state: AmpOptimizerState, groups: list[GradGroup]) -> None:
        for group in groups:
            group.abandon_block(1.0 / self.scale)
        state.grad_scale = 1.0
        self._end_abandoned(state)

    def _end_abandoned(self, state: AmpOptimizerState) -> None:
        """What DistributedDataParallel has left to this process is not averaged yet."""
        local = self.waited.get(id(state)) is Stage.LOCAL
        state.stage = Stage.LOCAL if local else Stage.READY

    @disable_dynamo
    def drop_all(self) -> None:
        """Drop all gradients, of which some are unscaled by now and some are not."""
        for state, groups in self.work:
            for group in groups:
                for tensor in (*group.params, *group.sources):
                    tensor.grad = None
                group.forget_copied(set_to_none=True)
            state.stage, state.grad_scale = Stage.READY, 1.0
            if state.pending is not None:
                state.pending.clear()
            if state.sync is not None:
                state.sync.clear()


class UnscaledBlock(Block):
    """A block at a static loss scale of 1, without masters: gradients are what backward leaves."""

    def begin(self) -> None:
        self._end_with(Stage.SCALED)

    def _unscale(self) -> bool:
        self._end_with(Stage.UNSCALED)
        return False

    def abandon(self, error: BaseException) -> None:
        self._end_with(Stage.READY)
        if self._drop_held():
            drop_grads(list(self._stepped()))


class DelayingBlock(Block):
    """A block with ``delay_unscale`` or ``delay_overflow_check``, or where DistributedDataParallel may not average."""

    def __init__(self, args: BlockArgs, parts: Sequence[BlockPart], delay: Delay | None) -> None:
        """See ``scale_loss`` for ``delay``."""
        super().__init__(args, parts)
        self.set_delay(delay)

    def _end_with(self, stage: Stage, grad_scale: float = 1.0) -> None:
        super()._end_with(stage, grad_scale)
        for state, groups in self.work:
            if stage in STAGE_AFTER.values() and stage is not Stage.UNSCALED:
                state.grads.unchecked |= self.copies_grads
            if stage is Stage.DELAYED:
                self._leave_delayed(state, groups)

    def set_delay(self, delay: Delay | None) -> None:
        """Delay this; None: nothing."""
        self.delay = delay
        self.copies_grads = delay != "delay_unscale"
        self.decides = delay is None

    def leave_to_averages(self) -> None:
        """Delay, for a block that has averages, what needs them: masters' gradients, or the decision about the step."""
        if any(state.masters.masters or state.policy.store_param_remainders for state in self.states):
            self.set_delay("delay_unscale")
        elif self.copies_grads and self.dynamic:
            self.set_delay("no_sync")

    def _unscale(self) -> bool:
        if self.decides:
            return super()._unscale()
        if self.copies_grads:
            unscale(self.groups, self.scale, check=False)
        self._end_with(STAGE_AFTER[self.delay], 1.0 if self.copies_grads else self.scale)
        return False


class Captured(BlockPart):
    """A block in a CUDA graph that is being captured: the step that belongs to it has to be captured, too."""

    def ended(self, block: Block) -> None:
        for state in block.states:
            state.stage = Stage.CAPTURED


class Saturation(BlockPart):
    """A device saturates where others give inf, and raises a flag instead.

    The flag is not about certain gradients, and what has saturated is finite. So each block reads the flag for its own,
    and ``OptimizerGrads.saturated`` stands for the inf that other devices keep until gradients are cleared. Of nested
    blocks it cannot be told which backward has raised the flag: it counts for the blocks around as well.
    """

    def __init__(self, around: Sequence[AmpOptimizerState]) -> None:
        """``around``: the optimizers of the blocks that are open."""
        self._around = around

    def before_begin(self, block: Block) -> None:
        for state, groups in block.work:
            state.grads.saturated = state.grads.saturated and not state.skip and _has_nonzero_grads(state, groups)
        if self._around:
            self._read_and_clear(block)
        else:
            clear_saturation(block.groups)

    def _read_and_clear(self, block: Block) -> bool:
        """Whether numbers have saturated, which the blocks around are told."""
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
                stay = state.stage is Stage.DELAYED or any(map(_has_own_grads, groups))
                state.grads.saturated = state.grads.saturated or stay


def _has_own_grads(group: GradGroup) -> bool:
    """True where a gradient is there that backward adds to, and that no other takes the place of."""
    return any(p is s and p.grad is not None for p, s in zip(group.params, group.sources, strict=True))


def _has_nonzero_grads(state: AmpOptimizerState, groups: Sequence[GradGroup]) -> bool:
    """True where gradients have not been cleared, by whatever means."""
    params = [p for group in groups for p in group.params]
    if state.stage is Stage.DELAYED:  # they have not been brought to masters
        params += [p for group in groups for p in group.sources]
    grads = [p.grad for p in params]
    return any(grad is not None and bool(grad.count_nonzero()) for grad in grads)


def decide(states: Iterable[AmpOptimizerState], loss_id: int, scaler: LossScaler, found_inf: bool) -> None:
    """Move the loss scale of ``scaler``, and have the next steps of ``states`` skipped where ``found_inf``."""
    before = scaler.scale
    try:
        scaler.update(found_inf)
    finally:  # it may warn, and a warning be an error: the step is to be skipped all the same
        decision = StepDecision(found_inf and scaler.dynamic, loss_id, before, scaler.scale)
        for state in states:
            if state.decision is None or not state.decision.skip:  # that a step is to be skipped stands until the step
                state.decision = decision
