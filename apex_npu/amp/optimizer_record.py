# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``OptimizerRecord``: what amp knows of one optimizer, and how that is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.data_parallel import DataParallel, LocalGrads
from apex_npu.amp.flat_model import FlatModel
from apex_npu.amp.gradients import GradUnit
from apex_npu.amp.master_params import MasterPair, copy_masters_to_model
from apex_npu.amp.open_check import OpenCheck
from apex_npu.amp.policy import Policy
from apex_npu.amp.session import Session, current
from apex_npu.amp.step_report import StepReport, Verdict
from apex_npu.fusion import FlatGrads, FusedGroup, are_same, drop_grads, zero_grads


@dataclass(eq=False)
class OptimizerRecord:
    """What amp knows of one optimizer.

    Attributes:
        policy: Of the ``initialize`` that adopted it.
        pairs: Model parameters and the masters that stand in ``param_groups`` in their stead.
        grad_scale: What the gradients are multiplied with now: 1 but inside scale_loss, and after ``delay_unscale``.
        held_scale: With ``fuse_unscale``, what the gradients of ``param_groups`` are multiplied with between blocks.
        clip_coefficient: With ``fuse_unscale``, what the next step has yet to multiply gradients by; float32, (1,).
        verdict: What scale_loss has decided about the next step; None: nothing since the last one.
        open_check: What the last block has left open, before which ``verdict`` does not count.
        delegated_check: What the last step has left to the device: whether it was skipped.
        latest_report: How the last call of ``step`` ended of which that is known.
        unchecked: The option by which the last block has put off looking at its gradients; None: it has looked.
        in_block: A scale_loss block is open.
        parallel: Who averages the gradients with whom; None: nobody.
        local_grads: Which gradients have not been averaged yet.
        aside: ``id(param)`` → param and its gradient, while that makes way for a backward that is scaled by hand.
        legacy: What scripts have put into ``_amp_stash``.
    """

    policy: Policy
    pairs: list[MasterPair] = field(default_factory=list)
    grad_scale: float = 1.0
    held_scale: float = 1.0
    clip_coefficient: Tensor | None = None
    verdict: Verdict | None = None
    open_check: OpenCheck | None = None
    delegated_check: OpenCheck | None = None
    latest_report: StepReport | None = None
    unchecked: Literal["delay_unscale", "delay_overflow_check"] | None = None
    in_block: bool = False
    parallel: DataParallel | None = None
    local_grads: LocalGrads = LocalGrads.NONE
    aside: dict[int, tuple[Tensor, Tensor]] | None = None
    legacy: dict[str, Any] = field(default_factory=dict)
    # The last block has been captured in a CUDA graph, and no step since.
    captured_block: bool = False
    # The session that knows the masters: another one, or that of a copy, has to be told.
    known_to: Session | None = None
    _units: list[GradUnit] = field(default_factory=list)
    _fitted_to: list[list[Any]] = field(default_factory=list)
    _own_flat: list[FlatGrads] = field(default_factory=list)
    _flat_model: FlatModel | None = None
    _of_pairs: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over ``state``, and tell the session, so that the copied model's state dicts find their masters."""
        self.__dict__.update(state)
        session = current()
        if self.policy.combine_ddp and session is not None:
            self.parallel = session.data_parallel
        tell_masters(self, session)

    def __getstate__(self) -> dict[str, Any]:
        """Without buffers: a copy makes its own."""
        self.close_check()
        self.last_step()
        own: dict[str, Any] = {
            "known_to": None,
            "in_block": False,
            "aside": None,
            "parallel": None,
            "_units": [],
            "_fitted_to": [],
            "_own_flat": [],
            "_flat_model": None,
            "_of_pairs": ([], []),
        }
        return {**self.__dict__, **own}

    @property
    def skip(self) -> bool:
        """The next step is to be skipped."""
        self.close_check()
        return self.verdict is not None and self.verdict.skip

    def close_check(self, norm: Tensor | None = None, look: Callable[[], Sequence[Tensor]] | None = None) -> None:
        """Have decided what the last block has left open; see ``OpenCheck.close``."""
        check = self.open_check
        if check is not None:
            check.close(norm, look)
            self.open_check = None

    @property
    def check_on_device(self) -> OpenCheck | None:
        """What the last block has left open, where the device can act on that by itself; else None."""
        check = self.open_check
        return check if check is not None and check.masks and check.is_open else None

    def look(self) -> None:
        """Have it known, if only to the device, whether gradients have overflowed: they are about to be changed."""
        check = self.check_on_device
        if check is not None:
            check.ask()
        else:
            self.close_check()

    def last_step(self) -> StepReport | None:
        """How the last call of ``step`` ended; waits where the device alone knows."""
        check = self.delegated_check
        if check is not None:
            check.close()
        return self.latest_report

    @property
    def holds(self) -> bool:
        """The next step has to divide gradients by the loss scale, or to clip them."""
        return self.held_scale != 1.0 or self.clip_coefficient is not None

    @property
    def scale_in_the_way(self) -> float:
        """What gradients are multiplied with that step must not see yet; 1: they are as they should be."""
        if self.grad_scale != 1.0:
            return self.grad_scale
        return self.held_scale if self.in_block or self.unchecked == "delay_unscale" else 1.0

    def clips_like_torch(self) -> bool:
        """All gradients lie in float32 buffers, unscaled: clipping these gives what torch's function would."""
        unscaled = self.scale_in_the_way == self.held_scale == 1.0
        return (
            unscaled
            and bool(self._units)
            and all(unit.flat is not None and unit.params[0].dtype == torch.float32 for unit in self._units)
        )

    def stop_sharing(self) -> None:
        """Masters that share the model's gradients, until the step, are about to be looked at: they get their own."""
        for unit in self._units:
            unit.stop_sharing()

    def units(self, optimizer: Optimizer) -> list[GradUnit]:
        """How the gradients of ``optimizer`` travel; made anew when its parameters, or their buffers, have changed."""
        flats = self._flats(optimizer)
        fitted_to: list[list[Any]] = [flats, *(group["params"] for group in optimizer.param_groups)]
        if len(fitted_to) != len(self._fitted_to) or not all(map(are_same, fitted_to, self._fitted_to)):
            former, self._units = self._units, self._make_units(optimizer, flats)
            for unit in self._units:
                unit.take_over(former)
            self._fitted_to = [list(part) for part in fitted_to]
        return self._units

    def clear_model_grads(self, set_to_none: bool) -> None:
        """Clear the gradients behind masters, whose own have been cleared."""
        if set_to_none:
            drop_grads(self.model_params)
        else:
            zero_grads(self.model_params)
        for unit in self._units:
            unit.know_cleared(set_to_none)

    @property
    def model_params(self) -> list[Tensor]:
        """Of ``pairs``."""
        return self._columns()[0]

    @property
    def masters(self) -> list[Tensor]:
        """Of ``pairs``."""
        return self._columns()[1]

    def _columns(self) -> tuple[list[Tensor], list[Tensor]]:
        if len(self._of_pairs[0]) != len(self.pairs):  # which only grow
            self._of_pairs = [pair.model_param for pair in self.pairs], [pair.master_param for pair in self.pairs]
        return self._of_pairs

    def copy_masters(self, optimizer: Optimizer, skipped: Tensor | None = None) -> None:
        """Round every master into its model parameter; see ``copy_masters_to_model``."""
        fused = getattr(optimizer, "is_npu_fused_optimizer", False)
        groups: list[FusedGroup] = optimizer.fused_groups() if fused else []  # type: ignore[attr-defined]
        if not groups or not self.pairs:
            copy_masters_to_model(self.pairs, skipped)
            return
        self.flat_model(groups).copy_masters(skipped)

    def has_flat_model(self, groups: Sequence[FusedGroup]) -> bool:
        """True where ``flat_model`` would move nothing."""
        return self._flat_model is not None and self._flat_model.fits(groups, self.pairs)

    def flat_model(self, groups: Sequence[FusedGroup]) -> FlatModel:
        """The model's low-precision parameters, fused like their masters; made anew when either has moved."""
        if not self.has_flat_model(groups):
            self._flat_model = None  # first: its memory is let go of as parameters move out
            self._flat_model = FlatModel.of(groups, self.pairs)
        assert self._flat_model is not None
        return self._flat_model

    def _flats(self, optimizer: Optimizer) -> list[FlatGrads]:
        if getattr(optimizer, "is_npu_fused_optimizer", False):
            fused: list[FlatGrads] = optimizer.flat_grads()  # type: ignore[attr-defined]
            return fused
        if not self.policy.combine_grad:
            return []
        params = [p for group in optimizer.param_groups for p in group["params"]]
        held = [p for flat in self._own_flat for p in flat.params]
        trainable = [p for p in params if p.requires_grad or p.grad is not None]
        if (
            len(held) != len(trainable)
            or {id(p) for p in held} != {id(p) for p in trainable}
            or any(flat.broken() for flat in self._own_flat)
        ):
            self._own_flat = _combine_grads(optimizer)
        return self._own_flat

    def _make_units(self, optimizer: Optimizer, flats: list[FlatGrads]) -> list[GradUnit]:
        model_param_of = {id(pair.master_param): pair.model_param for pair in self.pairs}

        def sources(params: list[Tensor]) -> list[Tensor]:
            return [model_param_of.get(id(p), p) for p in params]

        units = [GradUnit(flat.params, sources(flat.params), flat) for flat in flats]
        held = {id(p) for flat in flats for p in flat.params}
        loose: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in held:
                    loose.setdefault((p.device, p.dtype), []).append(p)
        return units + [GradUnit(params, sources(params)) for params in loose.values()]


def _combine_grads(optimizer: Optimizer) -> list[FlatGrads]:
    """One gradient buffer per (param_group, device, dtype) of an optimizer that has none of its own."""
    flats: list[FlatGrads] = []
    for group in optimizer.param_groups:
        members: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in group["params"]:
            if p.requires_grad or p.grad is not None:
                members.setdefault((p.device, p.dtype), []).append(p)
        flats.extend(FlatGrads.apart(params) for params in members.values())
    return flats


def tell_masters(record: OptimizerRecord, session: Session | None) -> None:
    """Let ``session`` know the pairs of ``record``: state dicts look for masters there."""
    if session is not None:
        for pair in record.pairs:
            session.masters[pair.model_param] = pair.master_param
    record.known_to = session


def inner_optimizer(optimizer: Any) -> Any:
    """What a wrapper that changes gradients before the step, such as LARC, has as ``optim``; else ``optimizer``."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) and not isinstance(optimizer, Optimizer) else optimizer


def record_of(optimizer: Any) -> OptimizerRecord | None:
    """What amp knows of ``optimizer``, or None where it was never passed to ``initialize``."""
    record: OptimizerRecord | None = getattr(optimizer, "_amp_record", None)
    return record
