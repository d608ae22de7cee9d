# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What blocks leave to the step: with ``fuse_unscale`` gradients stay multiplied with the loss scale until then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.block import STAGE_AFTER, Delay, DelayingBlock, Work, decide
from apex_npu.amp.deferred_inf_check import Deferral, DeferredInfCheck
from apex_npu.amp.device_skip import supports_found_inf
from apex_npu.amp.grad_groups import GradGroup, any_raised, found_inf_flags, look_for_overflow, separate, unscale
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage, inner_optimizer, state_of
from apex_npu.amp.scaler import LossScaler
from apex_npu.amp.session import Session, current
from apex_npu.backends import number_on
from apex_npu.backends._torch_private import disable_dynamo
from apex_npu.fusion import FlatGrads, HasFusedGroups, clip_coefficient, total_grad_norm
from apex_npu.ops import divides_in_update, joins_lists


class DeferringBlock(DelayingBlock):
    """A block of optimizers that have a ``Deferral``: gradients are divided, or their step is skipped, later."""

    def __init__(
        self,
        session: Session,
        optimizers: Sequence[Optimizer],
        work: Work,
        scaler: LossScaler,
        loss_id: int,
        delay: Delay | None,
        *,
        may_defer: bool,
    ) -> None:
        """Of ``may_defer`` the check may be left open: what processes decide together may not. See ``scale_loss``."""
        super().__init__(session, optimizers, work, scaler, loss_id, delay)
        self._fuses = any(state.policy.fuse_unscale for state, _ in work)
        self._alone = may_defer
        self._open: DeferredInfCheck | None = None

    @disable_dynamo
    def begin(self) -> None:
        """See ``Block``. With ``fuse_unscale`` gradients of masters are scaled by the loss scale, too."""
        if not self._fuses:
            super().begin()
            return
        if len(self.groups) > 1:
            separate(self.groups)
        scaled: list[tuple[GradGroup, float]] = []
        try:
            for state, groups in self.work:
                factor = self.scale / state.grad_scale
                self._unchecked |= state.grads.unchecked
                if state.skip:
                    state.drop_overflowed()
                    _deferral(state).clip_coefficient = None  # of gradients that are zeros now; NaN, maybe
                if state.stage in (Stage.DELAYED, Stage.LOCAL):
                    self._begin_delayed(state, groups)
                for group in groups:
                    group.begin_block(1.0)
                    group.scale_all_(factor)
                    scaled.append((group, 1.0 / factor))
            for state, groups in self.work:
                clip_now(state, groups)
            self._end_with(Stage.SCALED, self.scale)
        except Exception:
            for group, factor in scaled:
                group.scale_all_(factor)
                group.abandon_block(1.0)
            raise
        except BaseException:
            self.drop_all()  # an interrupt: some are scaled by now and some are not
            raise

    @disable_dynamo
    def unscale(self) -> bool:
        """See ``Block``. Where the check is deferred, the result is not known yet."""
        self._session.resolve_checks(self._scaler)
        found_inf = self.copies_grads and self._unscale()
        self._end_with(STAGE_AFTER[self.delay], self.scale if self._fuses or not self.copies_grads else 1.0)
        return found_inf

    def _unscale(self) -> bool:
        may_defer = self._alone and self.decides and self.dynamic and len(self.work) == 1
        on_device = may_defer and supports_found_inf(self.optimizers[0])
        leaves_open = may_defer and (self._fuses or on_device)
        check = self.dynamic and self.decides and not (leaves_open and self._fuses)
        scale = 1.0 if self._fuses else self.scale
        flags = unscale(self.groups, scale, check=check, share=self._fuses and self._alone)
        if leaves_open:
            for group in self.groups if check and self._unchecked else ():
                group.check(flags[0])
            self._leave_open(on_device, flags)
            return False
        if check and self._unchecked:
            flags += look_for_overflow(self.groups)
        return any_raised(flags)

    def _leave_open(self, on_device: bool, flags: list[Tensor]) -> None:
        groups, loss_id, scaler = self.groups, self._loss_id, self._scaler
        # The session has the check until the next block, and must not keep an optimizer alive.
        states = weakref.WeakSet(state for state, _ in self.work)

        def look() -> list[Tensor]:
            for group in groups:
                group.drop_cleared()  # an inf that has been cleared is none
            return look_for_overflow(groups)

        self._open = DeferredInfCheck(
            look,
            lambda found: decide(states, loss_id, scaler, found),
            on_device=on_device,
        )
        if flags:
            self._open.start(*flags)

    def decide(self, found_inf: bool) -> None:
        """See ``Block``."""
        if self._open is not None:
            _deferral(self.work[0][0]).check = self._session.open_checks[self._scaler] = self._open
        else:
            super().decide(found_inf)

    def _abandon_groups(self, state: AmpOptimizerState, groups: list[GradGroup]) -> None:
        if not self._fuses:
            super()._abandon_groups(state, groups)
            return
        for group in groups:
            group.abandon_block(1.0)
        self._end_abandoned(state)


def _deferral(state: AmpOptimizerState) -> Deferral:
    assert state.deferral is not None
    return state.deferral


def check_fusible(given: Sequence[Any]) -> None:
    """Refuse what cannot be right where gradients stay scaled after the block.

    Args:
        given: What ``scale_loss`` or ``initialize`` was given.

    Raises:
        RuntimeError: A wrapper, such as LARC, works on gradients before the step, or two optimizers step a parameter.
    """
    for optimizer in given:
        if inner_optimizer(optimizer) is not optimizer:
            raise RuntimeError(
                f"{type(optimizer).__name__} works on gradients before step(), which with fuse_unscale=True are still "
                "multiplied with the loss scale then; leave fuse_unscale out"
            )
    session = current()
    adopted = [] if session is None else [o for o in session.adopted if o not in given]
    holding = [o for o in adopted if (state := state_of(o)) is not None and holds(state)]
    if len(holding) + len(given) > 1:
        _check_unshared([*holding, *given])


def _check_unshared(optimizers: Sequence[Optimizer]) -> None:
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            owner = owners.setdefault(id(param), optimizer)
            if owner is not optimizer:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} belongs to two optimizers, {type(owner).__name__} and "
                    f"{type(optimizer).__name__}: with fuse_unscale=True each would unscale its gradient; leave "
                    "fuse_unscale out"
                )


# What the step does


def holds(state: AmpOptimizerState) -> bool:
    """The next step has to divide gradients by the loss scale, or to clip them."""
    deferral = state.deferral
    return state.policy.fuse_unscale and (
        state.grad_scale != 1.0 or (deferral is not None and deferral.clip_coefficient is not None)
    )


def take_step(
    optimizer: Optimizer, state: AmpOptimizerState, check: DeferredInfCheck | None, step: Callable[[], Any]
) -> Any:
    """Call ``step`` with what has been left to it.

    Args:
        optimizer: Whose step it is.
        state: The scale of its gradients, and how they are clipped.
        check: By which the device skips the step; None: it is to be taken.
        step: Its own.

    Returns:
        What it returns.
    """
    handed: Any = optimizer
    # They stand on the optimizer during its step alone, and no interrupt comes before they are deleted.
    handed.grad_scale = handed.found_inf = None
    try:
        handed_over = set_grad_scale(optimizer, state)
        if check is not None:
            handed.found_inf = check.start()
        result = step()
    finally:
        del handed.grad_scale, handed.found_inf
    if handed_over and not isinstance(optimizer, HasFusedGroups):  # torch's kernels write the unscaled gradients back
        state.grad_scale, _deferral(state).clip_coefficient = 1.0, None
    return result


def divide_before_step(optimizer: Optimizer, state: AmpOptimizerState) -> None:
    """Where the step would need separate launches to divide gradients, divide them with the check for overflow."""
    deferral = _deferral(state)
    if deferral.check is None or deferral.clip_coefficient is not None or not holds(state):
        return
    groups = state.grad_groups(optimizer)
    if any(divides_in_update(group.device) for group in groups):
        return

    def look() -> list[Tensor]:
        flags = _scale_and_look(groups, 1.0 / state.grad_scale)
        state.grad_scale = 1.0
        return flags

    deferral.resolve(look=look)


def set_grad_scale(optimizer: Optimizer, state: AmpOptimizerState) -> bool:
    """Have gradients divided by their scale, and clipped: in the step itself, where the optimizer can.

    Returns:
        True where the step finds the scale on the optimizer, as torch.amp.GradScaler hands it over.
    """
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    fuses = isinstance(optimizer, HasFusedGroups)
    # Code of the script reads them.
    are_read = bool(optimizer._optimizer_step_pre_hooks) or getattr(optimizer, "reads_param_grads", False)
    if not fuses or are_read:
        state.grads.materialize()
    if not holds(state):
        return False
    coefficient = _deferral(state).clip_coefficient
    if first is None or are_read or not _takes_grad_scale(optimizer, first.device):
        unscale_now_(state, state.grad_groups(optimizer))
        return False
    if coefficient is None and fuses and not divides_in_update(first.device):
        unscale_now_(state, state.grad_groups(optimizer))
        return False
    there = first.device if coefficient is None else coefficient.device
    scale = torch.full((1,), state.grad_scale, dtype=torch.float32, device=there)
    if coefficient is not None:
        scale /= coefficient
    optimizer.grad_scale = number_on(scale, first.device)  # type: ignore[attr-defined]
    return True


def _takes_grad_scale(optimizer: Optimizer, device: torch.device) -> bool:
    """True for optimizers that read ``grad_scale``: those of this package, and torch's with ``fused=True``."""
    if isinstance(optimizer, HasFusedGroups):
        return True
    # torch_npu's fused AdamW reads neither scale nor flag.
    return device.type != "npu" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def unscale_now_(state: AmpOptimizerState, groups: list[GradGroup]) -> None:
    """Divide gradients by their scale, and clip them, now rather than in the step."""
    _gather_joined(groups)
    clip_now(state, groups)
    if state.policy.fuse_unscale:
        for group in groups:
            group.scale_(1.0 / state.grad_scale)
        state.grad_scale = 1.0


def clip_now(state: AmpOptimizerState, groups: list[GradGroup]) -> None:
    """Clip now what was to be clipped by the next step: gradients to come have no part in it."""
    deferral = state.deferral
    if deferral is not None and deferral.clip_coefficient is not None:
        coefficient, deferral.clip_coefficient = deferral.clip_coefficient, None
        for group in groups:
            group.clip_(coefficient)


def clip_at_step(
    state: AmpOptimizerState,
    flats: list[FlatGrads],
    unfused: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Leave it to the next step to clip; the arguments and the norm are those of ``clip_grad_norm_``."""
    deferral = _deferral(state)
    check = deferral.device_check
    if check is not None:
        norm = _checked_norm(check, flats, unfused, norm_type)
    else:
        norm = total_grad_norm(flats, unfused, norm_type)
    device = norm.device
    if deferral.check is not None and check is None and norm_type > 0:  # others pass over inf and NaN
        norm = norm.cpu()  # the one wait of the step; what follows from it is cheaper on the host
        deferral.resolve(norm)
    if norm_type != 0:  # which counts, whatever the scale
        norm = norm / state.grad_scale
    before = deferral.clip_coefficient
    if before is not None and norm_type != 0:
        norm = norm * number_on(before, norm.device).squeeze()
    coefficient = clip_coefficient(norm, max_norm, norm_type, error_if_nonfinite).float().reshape(1)
    deferral.clip_coefficient = coefficient if before is None else coefficient * number_on(before, coefficient.device)
    return number_on(norm, device)


def _checked_norm(check: DeferredInfCheck, flats: list[FlatGrads], unfused: list[Tensor], norm_type: float) -> Tensor:
    """The norm, with a look for overflow that the host does not wait for."""
    if norm_type != 2.0 or check.flag is not None:
        if norm_type > 0:  # others pass over inf and NaN, which are looked for later
            check.start()
        return total_grad_norm(flats, unfused, norm_type)
    device = next(t.device for t in (*(flat.flat for flat in flats), *unfused))
    found_inf = torch.zeros(1, dtype=torch.float32, device=device)
    norm = total_grad_norm(flats, unfused, norm_type, found_inf)
    check.start(found_inf)
    return norm


def _gather_joined(groups: Sequence[GradGroup]) -> None:
    """Where gradients are gathered anyway, gather all: one that cannot be raises before any has been written."""
    for group in groups:
        if group.flat is not None and joins_lists(group.device):
            group.flat.gather()


def _scale_and_look(groups: Sequence[GradGroup], factor: float) -> list[Tensor]:
    """``look_for_overflow``, while the gradients are multiplied by ``factor``."""
    _gather_joined(groups)
    flags = found_inf_flags(groups)
    for group in groups:
        group.scale_(factor, flags[group.device])
    return list(flags.values())
