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
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from apex_npu._extension import disable_dynamo
from apex_npu.amp.capture import check_step
from apex_npu.amp.data_parallel import LocalGrads
from apex_npu.amp.delegated_skips import check_to_delegate, hand_over_flag, report_later, report_step, say_skipped
from apex_npu.amp.gradients import GradUnit
from apex_npu.amp.held_gradients import (
    clip_at_step,
    clip_held,
    divide_before_step,
    finish_hand_over,
    hand_over_scale,
    settle,
)
from apex_npu.amp.legacy.stash import LegacyOptimizerNames
from apex_npu.amp.master_params import make_masters
from apex_npu.amp.optimizer_record import OptimizerRecord, record_of, tell_masters
from apex_npu.amp.session import Session, current, disable_casts
from apex_npu.amp.step_report import StepReport, explain_skips
from apex_npu.fusion import FlatGrads, clip_grad_norm_, drop_grads

logger = logging.getLogger(__name__)


class AmpOptimizerMixin(LegacyOptimizerNames):
    """What amp adds to an optimizer: skipped steps, masters, and clearing the gradients of both of a pair."""

    _amp_record: OptimizerRecord

    @disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer, or none if the gradients have overflowed; then masters go back to the model.

        Raises:
            RuntimeError: A closure where amp cannot honour it; or a CUDA graph has captured the block, and not this.
        """
        # What torch's learning rate schedulers record, and the marks by which they see that they need not wrap this.
        self._opt_called = True
        record = self._amp_record
        check_step(self, record)
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
        check = check_to_delegate(self, record)
        if check is None:
            divide_before_step(self, record)
        if check is None and record.skip:
            _skip_step(self, record)
            return loss
        _check_unscaled(record, "step()")
        _check_averaged(record)
        _warn_of_missing_gradients(self, record)
        hand_over_scale(self, record)
        if check is not None:
            hand_over_flag(self, check)
        try:
            with disable_casts():
                super().step()
        finally:
            finish_hand_over(self)
        try:
            record.copy_masters(self, None if check is None else check.flag)
        except BaseException:
            # Another step() finds no gradients, and does nothing but copy again.
            for group in self.param_groups:
                drop_grads(group["params"])
            raise
        finally:
            _drop_master_grads(record)
            if check is not None:
                report_later(record, check)
            else:
                _end_step(record)
        return loss

    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def join_hook(self, **kwargs: Any) -> Any:
        """What torch.distributed.algorithms.Join asks for; optimizers that torch has made joinable have it.

        Raises:
            RuntimeError: Gradients are averaged by ``combine_ddp``, of which Join knows nothing.
        """
        if self._amp_record.parallel is not None:
            raise RuntimeError(
                "Join cannot let a process that has run out of data stand in for itself under combine_ddp=True: all "
                "processes have to call amp.scale_loss equally often. Pad or drop the last batches (DistributedSampler "
                "does either), or wrap the model in DistributedDataParallel instead, which has join()"
            )
        return super().join_hook(**kwargs)  # type: ignore[misc]

    @disable_dynamo
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients of all parameters, and of the model parameters behind masters."""
        if set_to_none is None:
            set_to_none = bool(getattr(self, "set_grad_none", True))
        record = self._amp_record
        record.close_check()  # while there is something to look at
        super().zero_grad(set_to_none)
        if record.pairs:
            record.clear_model_grads(set_to_none)
        if not record.in_block:  # there, what backward is about to add is scaled
            record.grad_scale = record.held_scale = 1.0
        record.local_grads = LocalGrads.NONE
        # They were about gradients that are gone.
        record.clip_coefficient = record.verdict = record.aside = record.unchecked = None

    def clip_optimizer_grad_norm_fused(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip what ``amp.master_params(optimizer)`` gives to a common norm; see ``FusedOptimizer``.

        Call it behind scale_loss, before ``step``. Without combined gradients they are clipped one by one. With
        ``fuse_unscale`` nothing is written: the next step multiplies by what is missing.

        Raises:
            RuntimeError: Gradients are still to be unscaled: a scale_loss is open, or the last had ``delay_unscale``.
        """
        record = self._amp_record
        # At a scale of 1 a plain backward is as good as a block, but for masters, and only a block ends what is left to
        # a step.
        if record.held_scale == 1.0 and not (record.policy.fuse_unscale and record.pairs):
            return self._clip_at_once(max_norm, norm_type, error_if_nonfinite)
        _check_unscaled(record, "clipping")
        flats, loose = _gradients_of(record.units(self))
        return clip_at_step(record, flats, loose, max_norm, norm_type, error_if_nonfinite)

    def _clip_at_once(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        record = self._amp_record
        _check_unscaled(record, "clipping")
        record.look()  # an inf that is clipped is none any more
        units = record.units(self)
        clip_held(record, units)
        return clip_grad_norm_(*_gradients_of(units), max_norm, norm_type, error_if_nonfinite)

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
        """The flat buffers that the model's parameters lie in, those without masters left out where there are any."""
        found: list[Tensor] = self.get_optimizer_combined_params()  # type: ignore[attr-defined]
        if not self._amp_record.pairs:
            return found
        return self._amp_record.flat_model(self.fused_groups()).flats  # type: ignore[attr-defined]

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


def _gradients_of(units: list[GradUnit]) -> tuple[list[FlatGrads], list[Tensor]]:
    """Buffers of gradients, and parameters whose gradients are in none."""
    flats = [unit.flat for unit in units if unit.flat is not None]
    return flats, [p for unit in units if unit.flat is None for p in unit.params]


def _check_unscaled(record: OptimizerRecord, caller: str) -> None:
    if record.scale_in_the_way == 1.0:
        return
    if record.in_block:
        reason = f"{caller} was called inside scale_loss, at whose end they are unscaled and checked; call it behind it"
    else:
        reason = (
            f"the last scale_loss had delay_unscale=True; before {caller}, close one without it, or call zero_grad()"
        )
    raise RuntimeError(f"the gradients are still multiplied with the loss scale {record.scale_in_the_way}: {reason}")


def _check_averaged(record: OptimizerRecord) -> None:
    if record.local_grads is not LocalGrads.NONE:
        raise RuntimeError(
            "the gradients are those of this process alone: the last scale_loss was inside of amp.no_sync(); before "
            "step(), close one outside of it, or call zero_grad()"
        )


def _warn_of_missing_gradients(optimizer: Optimizer, record: OptimizerRecord) -> None:
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


def _skip_step(optimizer: Optimizer, record: OptimizerRecord) -> None:
    report = _end_step(record)
    say_skipped(report)
    session = current()
    if session is not None and report.skips_in_a_row == session.skip_alarm:
        logger.error(
            "%s: %s", type(optimizer).__name__, explain_skips(report, _named_grads(session, optimizer, record))
        )
    _drop_master_grads(record)
    if record.holds:
        settle(record, record.units(optimizer))  # what is not cleared now is a gradient like any other


def _end_step(record: OptimizerRecord) -> StepReport:
    record.last_step()  # in order
    record.unchecked = None
    return report_step(record)


def _named_grads(session: Session, optimizer: Optimizer, record: OptimizerRecord) -> Iterator[tuple[str, Tensor]]:
    names = session.parameter_names()
    for unit in record.units(optimizer):
        for param, source in zip(unit.params, unit.sources, strict=True):
            if param.grad is not None:
                yield names.get(source, f"a parameter of shape {tuple(param.shape)}"), param.grad


def _drop_master_grads(record: OptimizerRecord) -> None:
    drop_grads(record.masters)


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
