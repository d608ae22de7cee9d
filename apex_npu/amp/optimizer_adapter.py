# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer under amp: ``adopt`` gives it amp's behaviour by class, and a record of what amp knows of it.

The class is swapped for one with ``AmpOptimizerMixin`` leftmost, so ``step``, ``zero_grad`` and ``add_param_group`` are
ordinary methods, deepcopy and pickle carry the record along, and nothing on the instance has to be put back.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from apex_npu._extension import disable_dynamo
from apex_npu.amp.data_parallel import DataParallel, LocalGrads
from apex_npu.amp.gradients import GradUnit
from apex_npu.amp.legacy.stash import LegacyOptimizerNames
from apex_npu.amp.master_params import MasterPair, copy_masters_to_model, make_masters
from apex_npu.amp.policy import Policy
from apex_npu.amp.session import Session, current, disable_casts
from apex_npu.amp.step_report import StepReport, Verdict, explain_skips, next_report
from apex_npu.fusion import FlatGrads, clip_coefficient, clip_grad_norm_, total_grad_norm

logger = logging.getLogger(__name__)


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
        last_step: How the last call of ``step`` ended.
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
    last_step: StepReport | None = None
    in_block: bool = False
    parallel: DataParallel | None = None
    local_grads: LocalGrads = LocalGrads.NONE
    aside: dict[int, tuple[Tensor, Tensor]] | None = None
    legacy: dict[str, Any] = field(default_factory=dict)
    # The session that knows the masters: another one, or that of a copy, has to be told.
    known_to: Session | None = None
    _units: list[GradUnit] = field(default_factory=list)
    _fitted_to: list[object] = field(default_factory=list)
    _own_flat: list[FlatGrads] = field(default_factory=list)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over ``state``, and tell the session, so that the copied model's state dicts find their masters."""
        self.__dict__.update(state)
        session = current()
        if self.policy.combine_ddp and session is not None:
            self.parallel = session.data_parallel
        tell_masters(self, session)

    def __getstate__(self) -> dict[str, Any]:
        """Without buffers: a copy makes its own."""
        forgotten: dict[str, Any] = {
            "known_to": None,
            "aside": None,
            "parallel": None,
            "_units": [],
            "_fitted_to": [],
            "_own_flat": [],
        }
        return {**self.__dict__, **forgotten}

    @property
    def skip(self) -> bool:
        """The next step is to be skipped."""
        return self.verdict is not None and self.verdict.skip

    def units(self, optimizer: Optimizer) -> list[GradUnit]:
        """How the gradients of ``optimizer`` travel; made anew when its parameters, or their buffers, have changed."""
        flats = self._flats(optimizer)
        fitted_to: list[object] = [*flats, *(p for group in optimizer.param_groups for p in group["params"])]
        if len(fitted_to) != len(self._fitted_to) or any(
            a is not b for a, b in zip(fitted_to, self._fitted_to, strict=True)
        ):
            self._units = self._make_units(optimizer, flats)
            self._fitted_to = fitted_to
        return self._units

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


class AmpOptimizerMixin(LegacyOptimizerNames):
    """What amp adds to an optimizer: skipped steps, masters, and clearing the gradients of both of a pair."""

    _amp_record: OptimizerRecord

    @disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer, or none if the gradients have overflowed; then masters go back to the model.

        Raises:
            RuntimeError: A closure where amp cannot honour it.
        """
        # What torch's learning rate schedulers record, and the marks by which they see that they need not wrap this.
        self._opt_called = True
        record = self._amp_record
        loss = None
        if closure is not None:
            if record.pairs or isinstance(self, LBFGS):
                raise RuntimeError(
                    "Currently, Amp does not support closure use with optimizers. Compute the loss, call scale_loss "
                    "and backward, then step() without arguments"
                )
            # Here rather than inside the optimizer, so that an overflow in it still skips the step.
            with torch.enable_grad():
                loss = closure()
        if record.skip:
            _skip_step(self, record)
            return loss
        _check_gradients(self, record)
        _hand_over_scale(self, record)
        with disable_casts():
            super().step()
        copy_masters_to_model(record.pairs)
        _drop_master_grads(record)
        _report(record)
        return loss

    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @disable_dynamo
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients of all parameters, and of the model parameters behind masters."""
        if set_to_none is None:
            set_to_none = bool(getattr(self, "set_grad_none", True))
        super().zero_grad(set_to_none)
        record = self._amp_record
        for pair in record.pairs:
            if set_to_none:
                pair.model_param.grad = None
            elif pair.model_param.grad is not None:
                with torch.no_grad():
                    pair.model_param.grad.zero_()
        record.grad_scale = record.held_scale = 1.0
        record.local_grads = LocalGrads.NONE
        record.clip_coefficient = record.verdict = record.aside = None  # they were about gradients that are gone

    def clip_optimizer_grad_norm_fused(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip what ``amp.master_params(optimizer)`` gives to a common norm; see ``FusedOptimizer``.

        Call it behind scale_loss, before ``step``. Without combined gradients they are clipped one by one. With
        ``fuse_unscale`` nothing is written: the next step multiplies by what is missing.
        """
        record = self._amp_record
        units = record.units(self)
        flats = [unit.flat for unit in units if unit.flat is not None]
        loose = [p for unit in units if unit.flat is None for p in unit.params]
        if record.held_scale != 1.0:
            return _clip_at_step(record, flats, loose, max_norm, norm_type, error_if_nonfinite)
        return clip_grad_norm_(flats, loose, max_norm, norm_type, error_if_nonfinite)

    def clip_model_grad_norm_fused(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Like ``clip_optimizer_grad_norm_fused`` where the model's parameters are the optimizer's.

        Raises:
            RuntimeError: The level has masters: clipping the model's own gradients would do nothing.
        """
        _require_no_masters(self._amp_record, "clip_model_grad_norm_fused", "clip_optimizer_grad_norm_fused")
        return self.clip_optimizer_grad_norm_fused(max_norm, norm_type, error_if_nonfinite)

    def get_optimizer_combined_grads(self) -> list[Tensor]:
        """The flat buffers of the gradients of what the optimizer steps; empty without combined gradients."""
        flats = [unit.flat for unit in self._amp_record.units(self) if unit.flat is not None]
        for flat in flats:
            flat.gather()
        return [flat.flat for flat in flats]

    def get_optimizer_combined_grad_masks(self) -> list[Tensor]:
        """For each of these buffers float32 ones where there is a gradient now, and zeros elsewhere."""
        return [unit.flat.mask() for unit in self._amp_record.units(self) if unit.flat is not None]

    def get_model_combined_params(self) -> list[Tensor]:
        """The flat buffers that the model's parameters lie in; of fused optimizers, without masters."""
        _require_no_masters(self._amp_record, "get_model_combined_params", "get_optimizer_combined_params")
        found: list[Tensor] = self.get_optimizer_combined_params()  # type: ignore[attr-defined]
        return found

    def get_model_combined_grads(self) -> list[Tensor]:
        """The flat buffers of the model's gradients, without masters."""
        _require_no_masters(self._amp_record, "get_model_combined_grads", "get_optimizer_combined_grads")
        return self.get_optimizer_combined_grads()

    def get_model_combined_grad_masks(self) -> list[Tensor]:
        """Their masks, without masters."""
        _require_no_masters(self._amp_record, "get_model_combined_grad_masks", "get_optimizer_combined_grad_masks")
        return self.get_optimizer_combined_grad_masks()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those in low precision get masters where the level has any."""
        super().add_param_group(param_group)
        pair_masters(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Classes made by ``adopt`` are found again through the class they were made from."""
        state = {**self.__getstate__(), "_amp_record": self._amp_record}
        return _new_adopted, (type(self).__bases__[1],), state


# Functions rather than methods: a name of the mixin would hide the same name of the class it is put before.


def _check_gradients(optimizer: Optimizer, record: OptimizerRecord) -> None:
    if record.grad_scale != 1.0:
        raise RuntimeError(
            f"the gradients are still multiplied with the loss scale {record.grad_scale}: the last scale_loss "
            "had delay_unscale=True; before step(), close one without it, or call zero_grad()"
        )
    if record.local_grads is not LocalGrads.NONE:
        raise RuntimeError(
            "the gradients are those of this process alone: the last scale_loss was inside of amp.no_sync(); before "
            "step(), close one outside of it, or call zero_grad()"
        )
    masters_lack = record.pairs and all(pair.master_param.grad is None for pair in record.pairs)
    if masters_lack and any(unit.has_undelivered() for unit in record.units(optimizer)):
        warnings.warn(
            "the model has gradients, but its fp32 masters, which this step updates, have none: was backward() "
            "called outside amp.scale_loss? Use `with amp.scale_loss(loss, optimizer) as scaled_loss: "
            "scaled_loss.backward()`",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    session = current()
    if session is not None and all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        session.warn_once(
            f"{type(optimizer).__name__}.step() was called, but none of its parameters has a gradient: was backward() "
            "called, and behind zero_grad() rather than before it?",
            stacklevel=5,
        )


def _hand_over_scale(optimizer: Optimizer, record: OptimizerRecord) -> None:
    """Have held gradients divided by their scale: in the step itself, where the optimizer can."""
    units = record.units(optimizer)
    if record.held_scale == 1.0 or not units:
        return
    scale = torch.full((1,), record.held_scale, dtype=torch.float32, device=units[0].device)
    if record.clip_coefficient is not None:
        scale /= record.clip_coefficient.to(scale.device)
    record.held_scale, record.clip_coefficient = 1.0, None
    if getattr(optimizer, "is_npu_fused_optimizer", False):
        optimizer.grad_scale_of_step = scale  # type: ignore[attr-defined]
        return
    factor = scale.reciprocal()
    with torch.no_grad():
        for unit in units:
            for grad in [p.grad for p in unit.params if p.grad is not None]:
                grad.mul_(factor.to(grad.device, grad.dtype))


def _clip_at_step(
    record: OptimizerRecord,
    flats: list[FlatGrads],
    loose: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    norm = total_grad_norm(flats, loose, norm_type)
    if norm_type != 0:  # which counts, whatever the scale
        norm = norm / record.held_scale
    before = record.clip_coefficient
    if before is not None and norm_type != 0:
        norm = norm * before.to(norm.device).squeeze()
    coefficient = clip_coefficient(norm, max_norm, norm_type, error_if_nonfinite).float().reshape(1)
    record.clip_coefficient = coefficient if before is None else coefficient * before.to(coefficient.device)
    return norm


def _skip_step(optimizer: Optimizer, record: OptimizerRecord) -> None:
    report = _report(record)
    session = current()
    if session is not None:
        session.say(
            f"Gradient overflow.  Skipping step, loss scaler {report.loss_id} reducing loss scale to "
            f"{report.scale_after}"
        )
        if report.skips_in_a_row == session.skip_alarm:
            logger.error(
                "%s: %s", type(optimizer).__name__, explain_skips(report, _named_grads(session, optimizer, record))
            )
    _drop_master_grads(record)
    for unit in record.units(optimizer) if record.held_scale != 1.0 else []:
        unit.scale_params_(1.0 / record.held_scale)
    record.held_scale, record.clip_coefficient = 1.0, None


def _report(record: OptimizerRecord) -> StepReport:
    record.last_step = next_report(record.verdict, record.last_step)
    record.verdict = None
    return record.last_step


def _named_grads(session: Session, optimizer: Optimizer, record: OptimizerRecord) -> Iterator[tuple[str, Tensor]]:
    names = session.parameter_names()
    for unit in record.units(optimizer):
        for param, source in zip(unit.params, unit.sources, strict=True):
            if param.grad is not None:
                yield names.get(source, f"a parameter of shape {tuple(param.shape)}"), param.grad


def _drop_master_grads(record: OptimizerRecord) -> None:
    for pair in record.pairs:
        pair.master_param.grad = None


def _require_no_masters(record: OptimizerRecord, name: str, instead: str) -> None:
    if record.pairs:
        raise RuntimeError(
            f"{name} can only be used when opt_level='O1' (or without masters); at "
            f"{record.policy.opt_level} the gradients that count are the masters': use {instead}"
        )


@functools.cache
def _adopted_class(cls: Any) -> Any:
    return type(
        cls.__name__, (AmpOptimizerMixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )


def _new_adopted(cls: Any) -> Optimizer:
    adopted: type[Optimizer] = _adopted_class(cls)
    return adopted.__new__(adopted)


def check_adoptable(optimizer: Optimizer) -> None:
    """Raise what ``adopt`` would raise.

    Raises:
        RuntimeError: It has been adopted before, or something else replaced ``step`` on the instance.
    """
    if record_of(optimizer) is not None:
        raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
    step = vars(optimizer).get("step")
    if step is not None and not _is_scheduler_wrapper(step):
        raise RuntimeError(
            f"Incoming optimizer already has step defined on the instance ({step!r}), which would hide amp's; pass the "
            "optimizer to amp.initialize before whatever wraps it"
        )


def _is_scheduler_wrapper(step: Any) -> bool:
    # torch's schedulers put a counting wrapper on the instance; older ones mark it _with_counter.
    return hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_with_counter")


def adopt(optimizer: Optimizer, session: Session, fp32_values: Mapping[int, Tensor]) -> None:
    """Give ``optimizer`` amp's behaviour, and masters where the policy asks for them.

    Args:
        optimizer: Has passed ``check_adoptable``.
        session: Whose policy it shall follow, and who is to know its masters.
        fp32_values: ``id(param)`` → the value before the model was cast.
    """
    vars(optimizer).pop("step", None)
    policy = session.policy
    optimizer._amp_record = OptimizerRecord(policy, parallel=session.data_parallel)  # type: ignore[attr-defined]
    session.adopted.add(optimizer)
    cls: Any = type(optimizer)
    optimizer.__class__ = _adopted_class(cls)
    if policy.check_combined_tensors is not None and getattr(optimizer, "is_npu_fused_optimizer", False):
        optimizer.check_combined_tensors = policy.check_combined_tensors  # type: ignore[attr-defined]
    pair_masters(optimizer, session, fp32_values)


def release(optimizer: Optimizer, cls: Any) -> None:
    """Take ``adopt`` back, as far as it got: ``cls`` is the class that the optimizer had."""
    record = record_of(optimizer)
    for pair in [] if record is None else record.pairs:
        if pair.master_param in optimizer.state:
            optimizer.state[pair.model_param] = optimizer.state.pop(pair.master_param)
    optimizer.__class__ = cls
    vars(optimizer).pop("_amp_record", None)


def pair_masters(
    optimizer: Optimizer, session: Session | None = None, fp32_values: Mapping[int, Tensor] = MappingProxyType({})
) -> None:
    """Make the masters that ``optimizer`` still lacks: for new groups, and for parameters that were frozen."""
    record = record_of(optimizer)
    if record is None or not record.policy.master_weights:
        return
    pairs = make_masters(optimizer, fp32_values)
    record.pairs.extend(pairs)
    session = session or current()
    if pairs or record.known_to is not session:
        tell_masters(record, session)
