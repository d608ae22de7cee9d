# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``PendingStep``: work that blocks leave to the step, which divides gradients, clips them, or is skipped.

With ``fuse_unscale`` gradients stay multiplied by the loss scale until then. Some devices can skip a step by
themselves, and the host reads ``found_inf`` later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.optimizer_grads import found_inf_flags
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.overflow_check import OverflowCheck
from apex_npu.amp.scaler import APPLIED
from apex_npu.amp.session import current, warn_once
from apex_npu.backends import number_on, numbers_on
from apex_npu.backends._torch_private import labelled
from apex_npu.distributed.part_sums import clip_coefficient, total_grad_norm
from apex_npu.fusion import FlatGrads, HasFusedGroups, WriteTable
from apex_npu.fusion.grad_slots import IN_BUFFER
from apex_npu.fusion.shards import local_part
from apex_npu.ops import cats_lists, divides_in_update, masks_writes

# A block or a step emits this warning once for each optimizer.
NOT_SCALED = (
    "gradients have been added to, written or replaced after amp.scale_loss, which with fuse_unscale=True leaves them "
    "multiplied by the loss scale until step: a backward outside of amp.scale_loss adds gradients without that factor, "
    "which then have almost no weight. Run it in a scale_loss block, or call optimizer.zero_grad() before it, or leave "
    "fuse_unscale out. Ignore this warning if the gradients were only multiplied"
)


def supports_found_inf(optimizer: Optimizer) -> bool:
    """Return whether a number on the device can make ``optimizer`` write nothing, at no extra cost."""
    # A skipped step must not call hooks.
    hooks = (
        getattr(optimizer, "_optimizer_step_pre_hooks", None),  # wrappers may leave out Optimizer.__init__
        getattr(optimizer, "_optimizer_step_post_hooks", None),
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    if any(hooks) or not isinstance(optimizer, HasFusedGroups):
        return False
    if not optimizer.steps_by_rule_alone():  # type: ignore[attr-defined]
        return False
    device: torch.device | None = optimizer.skips_on()  # type: ignore[attr-defined]
    # On other devices all written tensors would have to be cloned, which takes longer than a wait.
    return device is not None and masks_writes(device)


class ScaledGrads:
    """The gradients of parameters as they were when a block ended."""

    def __init__(self, groups: Sequence[GradGroup]) -> None:
        """Note the gradients of ``groups``."""
        self._parts = [(group, group.params, WriteTable()) for group in groups]
        for _, params, table in self._parts:
            table.note_grads(params)

    def are_written(self) -> bool:
        """Return True if gradients have been replaced or written, other than by gathering or clearing them."""
        nonzero: dict[torch.device, list[Tensor]] = {}
        for group, params, table in self._parts:
            written, moved = table.changed_grads(params)
            if moved and group.flat is not None:
                states = group.flat.states()
                moved = [k for k in moved if states[k] != IN_BUFFER]
            for k in written + moved:
                grad = params[k].grad
                assert grad is not None
                if grad.layout != torch.strided:
                    return True
                nonzero.setdefault(grad.device, []).append(local_part(grad).any())
        # One result for each device: reading each gradient's result would wait for the device each time.
        return any(bool(torch.stack(answers).any()) for answers in nonzero.values())


class PendingStep:
    """The work that the blocks of one optimizer leave to its step: to check, divide and clip gradients.

    The divisor is ``AmpOptimizerState.grad_scale``, which blocks need without this object, too.

    Attributes:
        check: The open check of the last block; None: its decision is known.
        skipped_check: The check that decided on the device about the last step; None: the host knows the outcome.
        clip_coefficient: The factor that the next step must still apply to gradients; float32, (1,).
        scaled: The gradients that the last block has left multiplied by the loss scale.
    """

    def __init__(self) -> None:
        self.scaled: ScaledGrads | None = None
        self.check: OverflowCheck | None = None
        self.skipped_check: OverflowCheck | None = None
        self.clip_coefficient: Tensor | None = None
        # A scale, and that scale divided by `clip_coefficient` on the device; None: not sent to the device.
        self._sent: tuple[float, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without gradients, which copies of parameters lack."""
        return {**vars(self), "scaled": None}

    def resolve(self, norm: Tensor | None = None, look: Callable[[], Sequence[Tensor]] | None = None) -> None:
        """Resolve the check that the last block has deferred; see ``OverflowCheck.resolve``."""
        check = self.check
        if check is not None:
            check.resolve(norm, look)
            self.check = None

    def resolve_step(self) -> None:
        """Find out whether the last step was skipped. Waits if only the device has the result."""
        check = self.skipped_check
        if check is not None:
            check.resolve()

    @property
    def device_check(self) -> OverflowCheck | None:
        """The check that the last block has deferred, if the device can act on its flag; else None."""
        check = self.check
        return check if check is not None and check.on_device and check.is_open else None

    def start(self) -> None:
        """Check gradients for overflow before they are changed; the result may stay on the device."""
        check = self.device_check
        if check is not None:
            check.start()
        else:
            self.resolve()

    def clear(self) -> None:
        """Take note that the gradients have been cleared."""
        self.clip_coefficient = self.scaled = None

    def look_for_unscaled(self, optimizer: Optimizer, state: AmpOptimizerState) -> None:
        """Warn if a backward outside of blocks may have added unscaled gradients to scaled ones."""
        scaled = self.scaled
        # A script may have declared that it has scaled them itself. They are then delayed.
        looks = state.grad_scale != 1.0 and state.stage is not Stage.DELAYED
        if scaled is not None and looks and scaled.are_written():
            self.scaled = None
            warn_once(optimizer, NOT_SCALED)

    def prepare(self, optimizer: Optimizer, state: AmpOptimizerState) -> OverflowCheck | None:
        """Prepare the step. Return the check with which the device decides; None: the host has decided."""
        self.look_for_unscaled(optimizer, state)
        state.drop_cleared()  # first, because a cleared inf does not count
        check = self._check_for_device(optimizer, state)
        if check is None:
            self._divide_with_check(optimizer, state)
            self.resolve()
        return check

    def _check_for_device(self, optimizer: Optimizer, state: AmpOptimizerState) -> OverflowCheck | None:
        check = self.device_check
        if check is None or not supports_found_inf(optimizer):
            return None
        if state.decision is not None and state.decision.skip:
            return None  # an earlier block has decided to skip the step
        session = current()
        # If the skip may raise the alarm, the host decides while the gradients to examine still exist.
        skips = 1 + (state.report or APPLIED).skips_in_a_row
        return check if session is None or skips != session.skip_alarm else None

    def _divide_with_check(self, optimizer: Optimizer, state: AmpOptimizerState) -> None:
        """Divide gradients with the check for overflow, if the step would need separate launches to divide them."""
        if self.check is None or self.clip_coefficient is not None or not state.holds_scaled:
            return
        groups = state.grads.groups_of(optimizer)
        if any(_divides_in_update(optimizer, group.device) for group in groups) or _any_narrow(groups):
            return

        def look() -> list[Tensor]:
            flags = _scale_and_look(groups, 1.0 / state.grad_scale)
            state.grad_scale = 1.0
            return flags

        self.resolve(look=look)

    def take(
        self, optimizer: Optimizer, state: AmpOptimizerState, check: OverflowCheck | None, step: Callable[[], Any]
    ) -> Any:
        """Call ``step``, the optimizer's own, with the work left to it; ``check`` is the result of ``prepare``."""
        handed: Any = optimizer
        # These attributes exist only during the step. They are set right before ``try``, so that an interrupt cannot
        # leave them.
        handed.grad_scale = handed.found_inf = None
        try:
            handed_over = self._hand_over_scale(optimizer, state)
            if check is not None:
                handed.found_inf = check.start()
            result = step()
        finally:
            del handed.grad_scale, handed.found_inf
        # torch's kernels write the unscaled gradients back.
        if handed_over and not isinstance(optimizer, HasFusedGroups):
            state.grad_scale, self.clip_coefficient = 1.0, None
        return result

    def _hand_over_scale(self, optimizer: Optimizer, state: AmpOptimizerState) -> bool:
        """Divide gradients by their scale and clip them, in the step itself if the optimizer supports this.

        Returns:
            True if the step reads ``optimizer.grad_scale``, the attribute that torch.amp.GradScaler also sets.
        """
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        divides = first is not None and _divides_in_update(optimizer, first.device)
        fuses = isinstance(optimizer, HasFusedGroups)
        # Code of the script reads the gradients.
        names = ("_optimizer_step_pre_hooks", "reads_param_grads")
        are_read = any(getattr(optimizer, name, None) for name in names)
        if not state.holds_scaled:
            return False
        coefficient = self.clip_coefficient
        plain = coefficient is None and fuses
        if (
            first is None
            or are_read
            or not _takes_grad_scale(optimizer, first.device)
            or (plain and not divides and not _any_narrow(state.grads.groups_of(optimizer)))
        ):
            self.unscale_now_(state, state.grads.groups_of(optimizer))
            return False
        if coefficient is None:
            scale = torch.full((1,), state.grad_scale, dtype=torch.float32, device=first.device)
        elif self._sent is not None and self._sent[0] == state.grad_scale:
            scale = self._sent[1]
        else:
            scale = _over(state.grad_scale, coefficient)
        optimizer.grad_scale = number_on(scale, first.device)  # type: ignore[attr-defined]
        return True

    def unscale_now_(self, state: AmpOptimizerState, groups: list[GradGroup]) -> None:
        """Divide gradients by their scale, and clip them, now rather than in the step."""
        _gather_joined(groups)
        self.clip_now(groups)
        if state.policy.fuse_unscale:
            for group in groups:
                group.scale_(1.0 / state.grad_scale)
            state.grad_scale = 1.0

    def clip_now(self, groups: Sequence[GradGroup]) -> None:
        """Clip gradients now instead of in the next step, since later gradients must not be clipped with them."""
        if self.clip_coefficient is not None:
            coefficient, self.clip_coefficient = self.clip_coefficient, None
            for group in groups:
                group.clip_(coefficient)

    @labelled("amp.clip")
    def clip(
        self,
        grad_scale: float,
        flats: list[FlatGrads],
        unfused: list[Tensor],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """Leave the clipping of gradients, which are multiplied by ``grad_scale``, to the next step.

        The other arguments and the result are those of ``clip_grad_norm_``.
        """
        check = self.device_check
        if check is not None:
            norm = _checked_norm(check, flats, unfused, norm_type)
        else:
            norm = total_grad_norm(flats, unfused, norm_type)
        device = norm.device
        if self.check is not None and check is None and norm_type > 0:  # other norms do not show inf and NaN
            norm = norm.cpu()  # the only wait of the step; the arithmetic below is cheaper on the host
            self.resolve(norm)
        if norm_type != 0:  # the 0-norm counts elements and does not depend on the scale
            norm = norm / grad_scale
        before = self.clip_coefficient
        if before is not None and norm_type != 0:
            norm = norm * number_on(before, norm.device).squeeze()
        coefficient = clip_coefficient(norm, max_norm, norm_type, error_if_nonfinite).float().reshape(1)
        if before is not None:
            coefficient = coefficient * number_on(before, coefficient.device)
        if norm.device == device:
            self.clip_coefficient, self._sent = coefficient, None
            return norm
        # One copy to the device, for the caller's norm and the step's scale.
        sent = numbers_on([float(_over(grad_scale, coefficient)), float(norm)], norm.dtype, device)
        self.clip_coefficient, self._sent = coefficient, (grad_scale, sent[:1].float())
        return sent[1]

    def report_later(self, state: AmpOptimizerState, check: OverflowCheck) -> None:
        """Record that the device decides about the step. The outcome is recorded when the check is resolved."""
        state.stage = Stage.READY
        with check.lock:
            self.skipped_check, self.check = check, None
            if not check.is_open:  # another thread has resolved it in the meantime
                self.end_delegated(state)

    def end_delegated(self, state: AmpOptimizerState) -> None:
        """Record the outcome of the last step once its check is resolved, if the device decided about it."""
        if self.skipped_check is not None:
            self.skipped_check = None
            report, session = state.note_step(), current()
            if report.skipped and session is not None:
                session.tell_skipped(report)


def _over(scale: float, coefficient: Tensor) -> Tensor:
    """Return the divisor that divides gradients by ``scale`` and multiplies them by ``coefficient``."""
    return torch.full_like(coefficient, scale).div_(coefficient)


def _divides_in_update(optimizer: Any, device: torch.device) -> bool:
    """True if the step of ``optimizer``, for parameters on ``device``, divides gradients without more launches."""
    return getattr(optimizer, "on_host", False) or divides_in_update(device)


def _takes_grad_scale(optimizer: Optimizer, device: torch.device) -> bool:
    """Return True for optimizers that read ``grad_scale``: those of this package, and torch's with ``fused=True``."""
    if isinstance(optimizer, HasFusedGroups):
        return True
    # torch_npu's fused AdamW reads neither scale nor flag.
    return device.type != "npu" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _checked_norm(check: OverflowCheck, flats: list[FlatGrads], unfused: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm, and start a check for overflow without waiting for it."""
    if norm_type != 2.0 or check.flag is not None:
        if norm_type > 0:  # other norms hide inf and NaN, which are checked later
            check.start()
        return total_grad_norm(flats, unfused, norm_type)
    device = flats[0].device if flats else unfused[0].device
    found_inf = torch.zeros(1, dtype=torch.float32, device=device)
    norm = total_grad_norm(flats, unfused, norm_type, found_inf)
    check.start(found_inf)
    return norm


def _any_narrow(groups: Sequence[GradGroup]) -> bool:
    """Return True if some gradients cannot be divided in place, because 16 bits would lose small ones."""
    return any(group.flat is not None and group.flat.stay_narrow() for group in groups)


def _gather_joined(groups: Sequence[GradGroup]) -> None:
    """Gather all gradients on devices that gather anyway, so that an error is raised before any is written."""
    for group in groups:
        if group.flat is not None and cats_lists(group.device):
            group.flat.gather()


def _scale_and_look(groups: Sequence[GradGroup], factor: float) -> list[Tensor]:
    """Do ``look_for_overflow`` while multiplying the gradients by ``factor``."""
    _gather_joined(groups)
    flags = found_inf_flags(groups)
    for group in groups:
        group.scale_(factor, flags[group.device])
    return list(flags.values())
