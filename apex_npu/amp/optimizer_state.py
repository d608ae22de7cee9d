# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``AmpOptimizerState``: amp's state of one optimizer, and the functions that look it up."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer

from apex_npu._cli import hooks
from apex_npu.amp.accessors import OptimizerAccessors
from apex_npu.amp.data_parallel import DataParallel
from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.masters import Masters
from apex_npu.amp.optimizer_grads import OptimizerGrads
from apex_npu.amp.policy import Policy
from apex_npu.amp.scaler import APPLIED, StepDecision, StepReport
from apex_npu.amp.session import current, warn_once
from apex_npu.backends._torch_private import labelled
from apex_npu.backends.failed_updates import half_updated, has_ended_queue
from apex_npu.distributed.rank_progress import has_peers
from apex_npu.distributed.torch_ddp import KnownDDPs, find_ddps
from apex_npu.fusion import drop_grads

# Warnings of step().
OUTSIDE_BLOCKS = (
    "step() was called with gradients that no amp.scale_loss has scaled and checked since the last step: was "
    "backward() called outside amp.scale_loss, or in a block of another optimizer alone? Use `with "
    "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
)
OF_OTHER_BLOCKS = (
    "amp.scale_loss blocks of other optimizers have given gradients to parameters of this optimizer. They are "
    "multiplied by the loss scale, and its step ignores them: clear them before a block of this optimizer, or pass all "
    "optimizers that the loss reaches to scale_loss, as a list"
)


class Stage(Enum):
    """The stages of an optimizer between two steps.

    ============  =====================================================================================
    READY         no ``scale_loss`` block since the last step, or since gradients were cleared
    SCALED        a block is open: gradients are multiplied by the loss scale
    DELAYED       gradients are still multiplied by the loss scale, after a block with ``delay_unscale``
    UNSCALED      gradients are ready for ``step``, and checked, unless ``grads.unchecked`` or a check is pending
    CAPTURED      as UNSCALED, in a CUDA graph that is being captured
    LOCAL         gradients are unscaled, unchecked and of one process: DistributedDataParallel averages them later
    ============  =====================================================================================
    """

    READY = 0
    SCALED = 1
    DELAYED = 2
    UNSCALED = 3
    CAPTURED = 4
    LOCAL = 5


@dataclass(eq=False)
class AmpOptimizerState:
    """Amp's state of one optimizer.

    Attributes:
        policy: The policy of the ``initialize`` that adopted the optimizer, with the script's later changes.
        stage: The stage of the optimizer between two steps.
        grad_scale: The factor of the gradients of ``param_groups``. With ``fuse_unscale`` it is the loss scale from the
            first block until gradients are cleared. Otherwise it is 1, except in a block and after ``delay_unscale``.
        decision: The decision of ``scale_loss`` about the next step; None: no decision since the last step.
        report: The report of the last step whose outcome is known.
        masters: The float32 values of 16-bit parameters.
        grads: The gradient groups of the optimizer, and the state of its gradients.
        pending: The work that blocks leave to the step, with ``fuse_unscale`` or if the device skips steps; else None.
        parallel: Averages gradients over processes, with ``combine_ddp``; else None.
        has_local_grads: There are gradients of this process that ``parallel`` has not averaged yet.
        legacy: An object that a package above amp keeps here; its ``clear`` is called when gradients are cleared.
        links: Objects that the optimizer shares with the models that it steps; see ``CopyLink``.
    """

    policy: Policy
    stage: Stage = Stage.READY
    grad_scale: float = 1.0
    decision: StepDecision | None = None
    report: StepReport | None = None
    masters: Masters = field(default_factory=Masters)
    grads: OptimizerGrads = field(default_factory=OptimizerGrads)
    pending: Any = None
    parallel: DataParallel | None = None
    has_local_grads: bool = False
    legacy: Any = None
    links: list[Any] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state as it is outside of a block, without buffers, which a copy makes itself."""
        self.resolve()
        # Parameters are copied without their gradients.
        fresh = {"stage": Stage.READY, "grad_scale": 1.0, "grads": OptimizerGrads()}
        # A copy averages over the processes of the session in which it is loaded.
        return {**self.__dict__, **fresh, "parallel": self.parallel is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``, and link it with the copied model, so that the model's state dicts show its masters."""
        self.__dict__.update(state)
        session = current()
        self.parallel = session.data_parallel if session is not None and state["parallel"] else None
        known: KnownDDPs = [] if session is None else session.ddps
        if session is None and self.links:
            find_ddps(known)
        for link in self.links:
            link.masters.append(self.masters)
            link.mark_copied(known)
            if session is not None:
                link.add_copies(session.add_copy)

    @property
    def widens(self) -> bool:
        """True if blocks widen the gradients of 16-bit parameters, whose float32 values the optimizer steps."""
        return bool(self.policy.master_weights)

    @property
    def waits(self) -> bool:
        """True if the optimizer waits for its first step, or for one after a block; False in an open block."""
        return self.stage is not Stage.SCALED and (self.report is None or self.stage is not Stage.READY)

    @property
    def skip(self) -> bool:
        """True if the next step will be skipped."""
        if self.pending is not None:
            self.pending.resolve()
        return self.decision is not None and self.decision.skip

    def resolve(self) -> None:
        """Make all decisions that were left to the device or to the step."""
        if self.pending is not None:
            self.pending.resolve()
            self.pending.resolve_step()

    @property
    def averages(self) -> bool:
        """True if the gradients are averaged over processes; the script can turn this off."""
        return bool(self.parallel is not None and self.policy.combine_ddp and self.policy.combine_grad)

    def combine(self, **options: Any) -> None:
        """Change ``combine_grad`` or ``combine_ddp`` of this optimizer alone, between two steps.

        Raises:
            RuntimeError: A block has left gradients, or ``initialize`` has not prepared the optimizer for
                ``combine_ddp``. Nothing is changed in these cases.
        """
        policy = replace(self.policy, **options)
        if policy == self.policy:
            return
        if policy.combine_ddp and self.parallel is None:
            raise RuntimeError(
                "combine_ddp = True was set on an optimizer that amp.initialize has not prepared for it; pass "
                "combine_grad=True and combine_ddp=True there"
            )
        if self.parallel is not None and self.stage is not Stage.READY:
            raise RuntimeError(
                f"{' and '.join(options)} was changed between amp.scale_loss and step(), when some gradients may be "
                "averages and others not; change it after step() or zero_grad()"
            )
        self.policy = policy

    def retire(self, undo: ExitStack | None = None) -> None:
        """Drop the masters, so that a step does not write the model, whose parameters another optimizer steps now.

        Args:
            undo: Receives the callback that undoes this.
        """
        if undo is not None:
            changed = ("masters", "grads", "stage", "decision")
            undo.callback(vars(self).update, {name: getattr(self, name) for name in changed})
        self.resolve()
        self.masters, self.grads = Masters(retired=True), OptimizerGrads()
        self.stage, self.decision = Stage.READY, None

    def check_has_model(self, optimizer: Optimizer, caller: str) -> None:
        """Raise if ``optimizer`` was retired; the message names ``caller``."""
        if self.masters.retired:
            raise RuntimeError(
                f"{caller} was called with {type(optimizer).__name__}, whose float32 values no model has any more: "
                "amp.shutdown() was called, or the model was passed to amp.initialize again with another optimizer, "
                "which steps its parameters now. Use that optimizer, pass all optimizers to one amp.initialize, or "
                "make a new optimizer of model.parameters() after amp.shutdown()"
            )

    @property
    def is_unscaled(self) -> bool:
        """True if a block at a scale of 1 can leave gradients as backward computes them."""
        skips = self.decision is not None and self.decision.skip
        return self.grad_scale == 1.0 and not self.widens and not skips

    @property
    def holds_scaled(self) -> bool:
        """True if the next step must divide gradients by the loss scale, or clip them."""
        clips = self.pending is not None and self.pending.clip_coefficient is not None
        return self.policy.fuse_unscale and (self.grad_scale != 1.0 or clips)

    @property
    def awaits_block(self) -> bool:
        """True if a block must unscale, check or widen the gradients before a step or clipping."""
        if self.stage in (Stage.SCALED, Stage.DELAYED):
            return self.grad_scale != 1.0 or self.policy.loss_scale == "dynamic" or self.widens
        return self.grad_scale != 1.0 and not self.policy.fuse_unscale

    def check_unscaled(self, caller: str) -> None:
        """Raise if a block is open, or the last one has left the gradients scaled; the message names ``caller``."""
        if not self.awaits_block:
            return
        if self.stage is Stage.SCALED:
            reason = (
                f"{caller} was called inside scale_loss, whose end unscales and checks them; call it after the block"
            )
        else:
            reason = (
                "the last scale_loss had delay_unscale=True, or was inside of DistributedDataParallel.no_sync() or "
                "after fully_shard's set_requires_gradient_sync(False), so that gradients are not averaged yet; before "
                f"{caller}, close a block without any of these, or call zero_grad()"
            )
        raise RuntimeError(f"the gradients are still multiplied by the loss scale {self.grad_scale}: {reason}")

    def clips_like_torch(self, groups: list[GradGroup]) -> bool:
        """Return whether clipping the buffers of ``groups``, all of its gradients, gives the same result as torch.

        This requires that all gradients are unscaled, in float32 buffers, and on at most one mesh.
        """
        buffered = all(group.flat is not None and group.flat.dtype == torch.float32 for group in groups)
        return self.grad_scale == 1.0 and bool(groups) and buffered and len(self.grads.meshes) <= 1

    def forget_own_values(self) -> None:
        """With several processes, set masters to the low-precision weights before the first block, as Apex does.

        A broadcast of ``p.data`` after ``initialize`` does not reach masters or remainders, which would then differ
        between processes. The sending process cannot detect it, since it writes nothing, so all processes do this.
        """
        if has_peers():
            self.masters.round_own_values()
        self.masters.own_values = []

    def drop_cleared(self, optimizer: Optimizer | None = None) -> None:
        """Clear gradients set aside whose delayed gradient a script has cleared; with ``optimizer`` emit warnings."""
        if self.stage is not Stage.SCALED:
            for group in self.grads.groups:
                group.drop_cleared()
            if self.grads.dropped and optimizer is not None:
                self.grads.dropped = False
                warn_once(optimizer, OF_OTHER_BLOCKS)

    def drop_overflowed(self) -> None:
        """Zero gradients whose step will be skipped, before a block, so that it finds only its own overflows.

        If all gradients have been cleared, the decision to skip is dropped instead.
        """
        self.drop_cleared()
        if self.pending is not None:
            self.pending.clear()  # the clipping factor may be NaN
        if any(group.has_grads() for group in self.grads.groups):
            for group in self.grads.groups:
                group.zero_()
        else:
            self.decision = None

    # A step

    def begin_step(self, optimizer: Optimizer) -> str | None:
        """Require gradients that the step of ``optimizer`` can use, and update masters with a script's writes.

        Returns:
            The text of a warning, or None.

        Raises:
            RuntimeError: Gradients are scaled, are of one process alone, or come from blocks of other optimizers.
        """
        warning = None
        for link in self.links:
            if link.showing:  # tensors of state dicts, to which a script may have written
                link.load_written()
        if self.grads.scaled_by:
            self._check_not_scaled_by_others(optimizer, f"{type(optimizer).__name__}.step()")
        if self.stage is not Stage.UNSCALED:
            warning = self._begin_without_block(optimizer)
        self.masters.begin_step(optimizer)
        if self.parallel is not None and self.has_local_grads:
            raise RuntimeError(
                "the gradients are those of this process alone: the last scale_loss was inside of amp.no_sync(); "
                "before step(), close one outside of it, or call zero_grad()"
            )
        for group in self.grads.groups_of(optimizer) if self.masters.swaps else ():
            group.begin_step()
        if self.grads.dropped:
            warning, self.grads.dropped = OF_OTHER_BLOCKS, False
        for param_group in optimizer.param_groups:
            for param in param_group["params"]:
                if param.grad is not None:
                    return None if warning is OUTSIDE_BLOCKS and _stands_still(optimizer) else warning
        return warning or _no_gradients(optimizer)

    def _begin_without_block(self, optimizer: Optimizer) -> str | None:
        """Check a step whose gradients are not the checked ones of a block; return the text of a warning, or None."""
        self.check_unscaled("step()")
        if self.stage is Stage.LOCAL:
            raise RuntimeError(
                "the gradients are those of this process alone: the last scale_loss was inside of "
                "DistributedDataParallel.no_sync(), or after fully_shard's set_requires_gradient_sync(False); before "
                "step(), close one without them, or call zero_grad()"
            )
        if self.stage is not Stage.READY:
            return None
        self.check_has_model(optimizer, "step()")
        if self.masters.own_values:
            self.forget_own_values()
        has_grads = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        return OUTSIDE_BLOCKS if has_grads and self.policy.loss_scale == "dynamic" else None

    def _check_not_scaled_by_others(self, optimizer: Optimizer, caller: str) -> None:
        """Raise if there are gradients, to which a block of other optimizers has added scaled ones."""
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                f"{caller} was called with gradients of {type(optimizer).__name__} that no block of it has unscaled: "
                f"a block that was given {self.grads.scaled_by} alone also reaches its parameters, and leaves their "
                "gradients multiplied by the loss scale. Pass all optimizers that the loss reaches to scale_loss, as a "
                "list, or call zero_grad() and then backward() in a separate block"
            )

    def drop_scaled_by_others(self, optimizer: Optimizer, groups: list[GradGroup]) -> None:
        """Before a block, drop the gradients of blocks of other optimizers. The next step emits a warning.

        Raises:
            RuntimeError: They have been added to gradients of a block of ``optimizer``.
        """
        if self.stage is not Stage.READY:
            self._check_not_scaled_by_others(optimizer, "amp.scale_loss")
        for group in groups:
            if group.has_grads():
                drop_grads(group.params)
                group.forget(set_to_none=True)
                self.grads.dropped = True

    def end_step(self, optimizer: Optimizer, check: Any = None) -> None:
        """Round masters into parameters and record the outcome; with ``check`` the device decides it."""
        try:
            self.masters.end_step(optimizer)
        except BaseException as error:
            # so that another step() does not step the same gradients again
            for group in optimizer.param_groups:
                drop_grads(group["params"])
            if has_ended_queue(error):  # of a launch of the update
                raise half_updated(type(optimizer).__name__, error) from error
            raise
        finally:
            for memory in self.grads.lending:
                memory.let_go()
            if check is not None:
                self.pending.report_later(self, check)
            else:
                self.note_step()

    def end_failed_step(self, optimizer: Optimizer, error: BaseException, *, begun: bool) -> None:
        """After ``error``, round masters into parameters if the own step has ``begun`` and may have written them."""
        interrupted = not isinstance(error, Exception)
        if begun or interrupted:
            self.masters.end_step(optimizer)
        if interrupted:  # no gradient may be stepped twice
            for group in optimizer.param_groups:
                drop_grads(group["params"])
            self.clear(set_to_none=True)

    @labelled("amp.skip")
    def skip_step(self, optimizer: Optimizer) -> None:
        """Record that the step of ``optimizer`` is skipped, and notify the session."""
        self.check_unscaled("step()")
        report = self.note_step()
        session = current()
        if session is not None:
            session.tell_skipped(report)
            alarms = report.skips_in_a_row == session.skip_alarm
            if alarms or session.verbosity > 0:
                hooks.step_skipped(optimizer, report, alarms, session.verbosity > 0)
        if self.holds_scaled:
            # Gradients that are not cleared now count as ordinary ones.
            self.pending.unscale_now_(self, self.grads.groups_of(optimizer))
        for memory in self.grads.lending:
            memory.let_go()

    def note_step(self) -> StepReport:
        """Record that ``step`` has ended as decided, and drop the decision."""
        if self.pending is not None:
            self.pending.resolve_step()  # in order
        decision, former = self.decision, self.report or APPLIED
        skip = decision is not None and decision.skip
        by: tuple[int | None, float | None, float | None] = (None, None, None) if decision is None else decision[1:]
        in_a_row = former.skips_in_a_row + 1 if skip else 0
        self.report = StepReport(not skip, *by, former.skipped_steps + skip, in_a_row)
        self.decision, self.grads.unchecked = None, False
        if self.stage is not Stage.SCALED:
            self.stage = Stage.READY
        return self.report

    def clear(self, set_to_none: bool) -> None:
        """Clear the model's gradients, after those of ``param_groups`` have been cleared."""
        for group in self.grads.groups if self.widens else ():
            group.forget(set_to_none)
        self.decision = None
        self.grads.unchecked = self.grads.saturated = False
        self.grads.scaled_by, self.has_local_grads = "", False
        if self.stage is not Stage.SCALED:  # in an open block backward is about to add scaled gradients
            self.stage, self.grad_scale = Stage.READY, 1.0
        for memory in self.grads.lending:
            memory.let_go()
        for rare in (self.pending, self.legacy):
            if rare is not None:
                rare.clear()


def _stands_still(optimizer: Optimizer) -> bool:
    """Return True at a learning rate of 0, which torch.distributed.checkpoint.state_dict uses to initialize state."""
    return all(group.get("lr", 1.0) == 0.0 for group in optimizer.param_groups)


def _no_gradients(optimizer: Optimizer) -> str | None:
    session = current()
    if session is None:
        return None
    session.check_sharded_before()
    return (
        f"{type(optimizer).__name__}.step() was called, but none of its parameters has a gradient: was backward() "
        "called, and after zero_grad() rather than before it?"
    )


def inner_optimizer(optimizer: Any) -> Any:
    """Return the ``optim`` of a wrapper that changes gradients before the step, such as LARC; else ``optimizer``."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) and not isinstance(optimizer, Optimizer) else optimizer


# Attributes in which wrappers of training frameworks hold the optimizer.
_WRAPPED = ("optimizer", "_optimizer", "opt")


def adopted_inside(optimizer: Any) -> Any:
    """Return the adopted optimizer that a training framework has wrapped in ``optimizer``; else ``optimizer``."""
    inner = optimizer
    for _ in range(4):  # wrappers of wrappers
        if isinstance(inner, OptimizerAccessors):  # false for a wrapper that forwards attributes
            return inner
        inner = next((w for w in (getattr(inner, name, None) for name in _WRAPPED) if w is not None), None)
    return optimizer


def stepped(given: Any) -> list[Optimizer]:
    """Return the optimizers of a block, given as to ``scale_loss``, without their wrappers."""
    listed = given if isinstance(given, (list, tuple)) else [given]
    return [inner_optimizer(adopted_inside(optimizer)) for optimizer in listed]


def state_of(optimizer: Any) -> AmpOptimizerState | None:
    """Amp's state of ``optimizer``; None if it was never passed to ``initialize``."""
    state: AmpOptimizerState | None = getattr(optimizer, "_amp_state", None)
    return state
