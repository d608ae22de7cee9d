# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``PendingStep``: what blocks leave to the step, to divide gradients, to clip them, or to skip by itself.

With ``fuse_unscale`` gradients stay multiplied with the loss scale until then. Where gradients have overflowed, some
devices skip the step, and the host reads ``found_inf`` later.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from apex_npu.amp.grad_groups import GradGroup, any_raised, found_inf_flags
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.scaled_grads import NOT_SCALED, ScaledGrads
from apex_npu.amp.session import current, warn_once
from apex_npu.backends import HostCopy, number_on, numbers_on
from apex_npu.backends._torch_private import disable_dynamo
from apex_npu.distributed import total_grad_norm
from apex_npu.fusion import FlatGrads, HasFusedGroups, clip_coefficient
from apex_npu.ops import cats_lists, divides_in_update, masks_writes


def supports_found_inf(optimizer: Optimizer) -> bool:
    """True where a number on the device can make ``optimizer`` write nothing, and that is cheap."""
    # A hook is not to be called for a step that is skipped.
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    if any(hooks) or not isinstance(optimizer, HasFusedGroups):
        return False
    if not optimizer.steps_by_rule_alone():  # type: ignore[attr-defined]
        return False
    device: torch.device | None = optimizer.skips_on()  # type: ignore[attr-defined]
    # Elsewhere all that is written would have to be cloned, which takes longer than a wait.
    return device is not None and masks_writes(device)


class DeferredInfCheck:
    """The check that a ``scale_loss`` block has deferred, and what follows from it.

    Gradients that ``fuse_unscale`` leaves scaled need not be written at the end of a block, so that checking them would
    be a pass of its own. Their norm gives the same result; otherwise the check runs when it is first needed.

    Where the device can skip the step, the host does not wait for the result either: the device reads ``flag``, and the
    host reads a copy of it when that has arrived.

    Attributes:
        thread: The identifier of the thread whose block it was.
        on_device: The device can skip the step that follows.
        flag: On the device, one float32 number, not 0 where a gradient is inf or NaN; None: not checked yet.
        lock: Held while it is decided.
    """

    def __init__(
        self, look: Callable[[], Sequence[Tensor]], decide: Callable[[bool], None], *, on_device: bool = False
    ) -> None:
        """Of gradients that have not been checked.

        Args:
            look: Reads every gradient; gives what ``any_raised`` takes.
            decide: Called once, with whether one of them is inf or NaN.
            on_device: See the attributes.
        """
        self.thread = threading.get_ident()
        self.on_device = on_device
        self.flag: Tensor | None = None
        self._arriving: HostCopy | None = None
        # Each is released when it is done: the check refers to gradients, parameters, buffers.
        self._look: Callable[[], Sequence[Tensor]] | None = look
        self._decide: Callable[[bool], None] | None = decide
        self.lock = threading.RLock()  # another thread may read the loss scale; deciding reads it, too

    @property
    def is_open(self) -> bool:
        """False once it is decided."""
        return self._decide is not None

    @disable_dynamo
    def start(self, flag: Tensor | None = None) -> Tensor:
        """Have the device check, without a wait; only where it is ``on_device``.

        Args:
            flag: The answer, where it is there already; None: the gradients are read.

        Returns:
            ``flag``, of the attributes.
        """
        with self.lock:
            if self.flag is None:
                if flag is None:
                    assert self._look is not None
                    (flag,) = self._look()
                self.flag, self._arriving = flag, HostCopy(flag)
                self._look = None
            return self.flag

    @disable_dynamo
    def resolve(self, norm: Tensor | None = None, look: Callable[[], Sequence[Tensor]] | None = None) -> None:
        """Have it decided; later calls do nothing.

        Args:
            norm: Of all these gradients, and inf or NaN where one of them is; None: it has not been taken.
            look: Another way to read every gradient, if that has yet to be done.
        """
        with self.lock:
            decide = self._decide
            if decide is None:
                return
            found_inf = self._result(norm, look)
            self._decide = self._look = self._arriving = None
            decide(found_inf)

    def _result(self, norm: Tensor | None, look: Callable[[], Sequence[Tensor]] | None) -> bool:
        if self._arriving is not None:
            return bool(self._arriving)
        if norm is not None and math.isfinite(norm):
            return False
        look = look or self._look  # a norm can overflow where no gradient has
        assert look is not None
        flags = look()
        if self.on_device:
            self.flag = flags[0]  # for a step that has begun already, in another thread
        return any_raised(flags)


class PendingStep:
    """What the blocks of one optimizer leave to its step: to check gradients, to divide and to clip them.

    By how much they are to be divided is ``AmpOptimizerState.grad_scale``, which blocks need without this, too.

    Attributes:
        check: Of the last block, before which its decision is not known; None: it is known.
        skipped_check: The check by which the device has taken or skipped the last step; None: the host has the result.
        clip_coefficient: What the next step has yet to multiply gradients by; float32, (1,).
        scaled: The gradients that the last block has left multiplied by the loss scale.
    """

    def __init__(self) -> None:
        self.scaled: ScaledGrads | None = None
        self.check: DeferredInfCheck | None = None
        self.skipped_check: DeferredInfCheck | None = None
        self.clip_coefficient: Tensor | None = None
        # A scale, and on the device that scale divided by `clip_coefficient`; None: it has not been sent there.
        self._sent: tuple[float, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without gradients, which copies of parameters lack."""
        return {**vars(self), "scaled": None}

    def resolve(self, norm: Tensor | None = None, look: Callable[[], Sequence[Tensor]] | None = None) -> None:
        """Resolve the check that the last block has deferred; see ``DeferredInfCheck.resolve``."""
        check = self.check
        if check is not None:
            check.resolve(norm, look)
            self.check = None

    def resolve_step(self) -> None:
        """Find out whether the last step was skipped; waits where only the device has the result."""
        check = self.skipped_check
        if check is not None:
            check.resolve()

    @property
    def device_check(self) -> DeferredInfCheck | None:
        """The check that the last block has deferred, where the device can act on its flag; else None."""
        check = self.check
        return check if check is not None and check.on_device and check.is_open else None

    def start(self) -> None:
        """Have it known, if only to the device, whether gradients have overflowed: they are about to be changed."""
        check = self.device_check
        if check is not None:
            check.start()
        else:
            self.resolve()

    def clear(self) -> None:
        """The gradients have been cleared."""
        self.clip_coefficient = self.scaled = None

    def look_for_unscaled(self, optimizer: Optimizer, state: AmpOptimizerState) -> None:
        """Warn of gradients that a backward outside of blocks may have left among those that are scaled."""
        scaled = self.scaled
        # A script may have declared that it has scaled them itself: they are delayed then.
        looks = state.grad_scale != 1.0 and state.stage is not Stage.DELAYED
        if scaled is not None and looks and scaled.are_written():
            self.scaled = None
            warn_once(optimizer, NOT_SCALED)

    def prepare(self, optimizer: Optimizer, state: AmpOptimizerState) -> DeferredInfCheck | None:
        """Before the step: the check by which the device skips it; None: the host knows by now whether to."""
        self.look_for_unscaled(optimizer, state)
        state.drop_cleared()  # first: an inf that has been cleared is none
        check = self._check_for_device(optimizer, state)
        if check is None:
            self._divide_with_check(optimizer, state)
            self.resolve()
        return check

    def _check_for_device(self, optimizer: Optimizer, state: AmpOptimizerState) -> DeferredInfCheck | None:
        check = self.device_check
        if check is None or not supports_found_inf(optimizer):
            return None
        if state.decision is not None and state.decision.skip:
            return None  # by an earlier block
        session, last = current(), state.report
        # The step that may raise the alarm: what has overflowed is looked for in gradients that are still there.
        skips = 1 + (0 if last is None else last.skips_in_a_row)
        return check if session is None or skips != session.skip_alarm else None

    def _divide_with_check(self, optimizer: Optimizer, state: AmpOptimizerState) -> None:
        """Where the step would need separate launches to divide gradients, divide them with the check for overflow."""
        if self.check is None or self.clip_coefficient is not None or not state.holds_scaled:
            return
        groups = state.grad_groups(optimizer)
        if any(divides_in_update(group.device) for group in groups) or any_packed(groups):
            return

        def look() -> list[Tensor]:
            flags = _scale_and_look(groups, 1.0 / state.grad_scale)
            state.grad_scale = 1.0
            return flags

        self.resolve(look=look)

    def take(
        self, optimizer: Optimizer, state: AmpOptimizerState, check: DeferredInfCheck | None, step: Callable[[], Any]
    ) -> Any:
        """Call ``step``, the own one of ``optimizer``, with what has been left to it; ``check`` is of ``prepare``."""
        handed: Any = optimizer
        # They stand on the optimizer during its step alone, and no interrupt comes before they are deleted.
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
        if not state.holds_scaled:
            return False
        coefficient = self.clip_coefficient
        plain = coefficient is None and fuses
        if (
            first is None
            or are_read
            or not _takes_grad_scale(optimizer, first.device)
            or (plain and not divides_in_update(first.device) and not any_packed(state.grad_groups(optimizer)))
        ):
            self.unscale_now_(state, state.grad_groups(optimizer))
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
        """Clip now what was to be clipped by the next step: gradients to come have no part in it."""
        if self.clip_coefficient is not None:
            coefficient, self.clip_coefficient = self.clip_coefficient, None
            for group in groups:
                group.clip_(coefficient)

    def clip(
        self,
        grad_scale: float,
        flats: list[FlatGrads],
        unfused: list[Tensor],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """Leave it to the next step to clip gradients that are multiplied with ``grad_scale``.

        The other arguments and the norm are those of ``clip_grad_norm_``.
        """
        check = self.device_check
        if check is not None:
            norm = _checked_norm(check, flats, unfused, norm_type)
        else:
            norm = total_grad_norm(flats, unfused, norm_type)
        device = norm.device
        if self.check is not None and check is None and norm_type > 0:  # others pass over inf and NaN
            norm = norm.cpu()  # the one wait of the step; what follows from it is cheaper on the host
            self.resolve(norm)
        if norm_type != 0:  # which counts, whatever the scale
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
        # One copy for what the caller gets and what the step reads.
        sent = numbers_on([float(_over(grad_scale, coefficient)), float(norm)], norm.dtype, device)
        self.clip_coefficient, self._sent = coefficient, (grad_scale, sent[:1].float())
        return sent[1]

    def report_later(self, state: AmpOptimizerState, check: DeferredInfCheck) -> None:
        """Record that the device has taken or skipped the step; which, is recorded when the check is resolved."""
        state.stage = Stage.READY
        with check.lock:
            self.skipped_check, self.check = check, None
            if not check.is_open:  # another thread has resolved it meanwhile
                self.end_delegated(state)

    def end_delegated(self, state: AmpOptimizerState) -> None:
        """The check of the last step is resolved: record whether the device has taken it, if that was left to it."""
        if self.skipped_check is not None:
            self.skipped_check = None
            report, session = state.note_step(), current()
            if report.skipped and session is not None:
                session.tell_skipped(report)


def _over(scale: float, coefficient: Tensor) -> Tensor:
    """What gradients are divided by, to be divided by ``scale`` and multiplied by ``coefficient``."""
    return torch.full_like(coefficient, scale).div_(coefficient)


def _takes_grad_scale(optimizer: Optimizer, device: torch.device) -> bool:
    """True for optimizers that read ``grad_scale``: those of this package, and torch's with ``fused=True``."""
    if isinstance(optimizer, HasFusedGroups):
        return True
    # torch_npu's fused AdamW reads neither scale nor flag.
    return device.type != "npu" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _checked_norm(check: DeferredInfCheck, flats: list[FlatGrads], unfused: list[Tensor], norm_type: float) -> Tensor:
    """The norm, with a look for overflow that the host does not wait for."""
    if norm_type != 2.0 or check.flag is not None:
        if norm_type > 0:  # others pass over inf and NaN, which are looked for later
            check.start()
        return total_grad_norm(flats, unfused, norm_type)
    device = flats[0].device if flats else unfused[0].device
    found_inf = torch.zeros(1, dtype=torch.float32, device=device)
    norm = total_grad_norm(flats, unfused, norm_type, found_inf)
    check.start(found_inf)
    return norm


def any_packed(groups: Sequence[GradGroup]) -> bool:
    """True where some cannot be divided in place: in 16 bits small ones would be lost."""
    return any(group.flat is not None and group.flat.is_packed for group in groups)


def _gather_joined(groups: Sequence[GradGroup]) -> None:
    """Where gradients are gathered anyway, gather all: one that cannot be raises before any has been written."""
    for group in groups:
        if group.flat is not None and cats_lists(group.device):
            group.flat.gather()


def _scale_and_look(groups: Sequence[GradGroup], factor: float) -> list[Tensor]:
    """``look_for_overflow``, while the gradients are multiplied by ``factor``."""
    _gather_joined(groups)
    flags = found_inf_flags(groups)
    for group in groups:
        group.scale_(factor, flags[group.device])
    return list(flags.values())
