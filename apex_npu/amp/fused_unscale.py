# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Blocks that leave work to the step. With ``fuse_unscale`` the step divides gradients by the loss scale."""

from __future__ import annotations

import weakref

from torch import Tensor

from apex_npu.amp.block import STAGE_AFTER, Block, decide
from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.optimizer_grads import any_raised, look_for_overflow, unscale
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.overflow_check import OverflowCheck
from apex_npu.amp.pending_step import ScaledGrads, supports_found_inf


class DeferringBlock(Block):
    """A block whose optimizers have a ``PendingStep``, which later divides gradients or skips the step.

    Attributes:
        may_defer: The check may stay open after the block. It is False if processes decide together.
    """

    may_defer = True

    def begin(self, scaled_loss: Tensor) -> Tensor:
        """Also warn of unscaled gradients that a backward outside of blocks has added to scaled ones."""
        self.fuses = any(state.policy.fuse_unscale for state in self.states)
        for optimizer, state in zip(self.optimizers, self.states, strict=True):
            if state.pending is not None:
                state.pending.look_for_unscaled(optimizer, state)
        return super().begin(scaled_loss)

    def _end_with(self, stage: Stage, grad_scale: float = 1.0) -> None:
        if stage is Stage.SCALED and self.fuses:  # clip gradients left to the step before backward adds to them
            for state, groups in self.work:
                state.pending.clip_now(groups)
        super()._end_with(stage, grad_scale)
        if grad_scale != 1.0 and self.fuses and stage is not Stage.SCALED:
            for state, groups in self.work:
                # Nothing reads this while gradients are delayed.
                state.pending.scaled = None if stage is Stage.DELAYED else ScaledGrads(groups)

    def _unscale(self) -> bool:
        """Return whether a gradient is inf or NaN; False if the check is deferred."""
        self.session.resolve_checks(self.scaler)
        check: OverflowCheck | None = None
        found_inf = False
        if self.unscales:
            found_inf, check = self._bring()
        self._end_with(STAGE_AFTER[self.delay], self.scale if self.fuses or not self.unscales else 1.0)
        if check is not None:
            self.decides = False  # the check decides when it is resolved
            self.states[0].pending.check = self.session.open_checks[self.scaler] = check
        return found_inf

    def _bring(self) -> tuple[bool, OverflowCheck | None]:
        """Bring gradients to the parameters; return whether one is inf or NaN, and the check if it is deferred."""
        may_defer = self.may_defer and self.decides and self.dynamic and len(self.work) == 1
        on_device = may_defer and supports_found_inf(self.optimizers[0])
        leaves_open = may_defer and (self.fuses or on_device)
        check = self.dynamic and self.decides and not (leaves_open and self.fuses)
        scale = 1.0 if self.fuses else self.scale
        flags = unscale(self.groups, scale, check=check, share=self.fuses and self.may_defer)
        if leaves_open:
            for group in self.groups if check and self._unchecked else ():
                group.check(flags[0])
            return False, self._open_check(on_device, flags)
        if check and self._unchecked:
            flags += look_for_overflow(self.groups)
        return any_raised(flags), None

    def _open_check(self, on_device: bool, flags: list[Tensor]) -> OverflowCheck:
        groups, loss_id, scaler = self.groups, self._loss_id, self.scaler
        # Weak, because the session holds the check until the next block.
        held = weakref.WeakSet(self.states)

        def look() -> list[Tensor]:
            for group in groups:
                group.drop_cleared()  # a cleared inf does not count
            return look_for_overflow(groups)

        def settle(found_inf: bool) -> None:
            states = list(held)
            for state in states:
                state.pending.check = None
            try:
                decide(states, loss_id, scaler, found_inf)
            finally:  # decide may warn, and warnings may be errors
                for state in states:
                    state.pending.end_delegated(state)

        check = OverflowCheck(look, settle, on_device=on_device)
        if flags:
            check.start(*flags)
        return check

    def _abandon_state(self, state: AmpOptimizerState, groups: list[GradGroup]) -> None:
        if not self.fuses:
            super()._abandon_state(state, groups)
            return
        for group in groups:
            group.abandon_block(1.0, fuses=True)
        state.pending.scaled = ScaledGrads(groups)
        self._end_abandoned(state)
