# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What scripts touch on an optimizer that amp has adopted: ``_amp_stash`` and the methods around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.gradients import GradUnit, any_raised, clear_overflow_flags, unscale_units
from apex_npu.amp.held_gradients import HoldsGradients, settle
from apex_npu.amp.legacy.scaler import LossScaler
from apex_npu.amp.master_params import MasterPair, copy_masters_to_model
from apex_npu.amp.policy import Policy
from apex_npu.amp.session import current
from apex_npu.ops import LOW_PRECISION

Aside = dict[int, tuple[Tensor, Tensor]]


class Record(HoldsGradients, Protocol):
    """What is needed here of the record that amp keeps of an optimizer."""

    policy: Policy
    pairs: list[MasterPair]
    grad_scale: float
    skip: bool
    aside: Aside | None
    legacy: dict[str, Any]

    def close_check(self) -> None:
        """Have decided what the last block has left open."""
        ...

    def units(self, optimizer: Optimizer) -> list[GradUnit]:
        """How its gradients travel."""
        ...


# ------------------------------------------------------------------------------------------------- gradients, by hand


def set_grads_aside(units: list[GradUnit]) -> Aside:
    """Clear the way for a scaled backward.

    Returns:
        What was there already, for ``bring_grads``. (Masters keep theirs: backward does not write there.)
    """
    clear_overflow_flags(units)
    aside: Aside = {}
    for unit in units:
        unit.forget_cleared()
        unit.drop_source_grads()
        for param, source in zip(unit.params, unit.sources, strict=True):
            if param is source and param.grad is not None:
                # A fused optimizer's gradient is a view of a buffer, into which the next one will be gathered.
                aside[id(param)] = param, param.grad if unit.flat is None else param.grad.clone()
                param.grad = None
    return aside


@torch.no_grad()
def bring_grads(units: list[GradUnit], aside: Aside, scaler: LossScaler) -> None:
    """Unscale what backward has left, bring it to the masters, and add what was set aside.

    Args:
        units: As for ``set_grads_aside``.
        aside: What that returned.
        scaler: Whose scale the gradients have, and who is told of an overflow.
    """
    found_inf = any_raised(unscale_units(units, scaler.loss_scale(), check=scaler.dynamic))
    for param, grad in aside.values():
        param.grad = grad if param.grad is None else param.grad.add_(grad)
    scaler._has_overflow = scaler._has_overflow or found_inf


# ------------------------------------------------------------------------------------------------------------ the stash


class AmpStash:
    """A live view of what amp knows of an optimizer, under Apex's names.

    The lists are made anew at each look. The flags can be assigned: ``params_have_scaled_gradients`` says whether the
    gradients that are there are scaled (by the first loss scale); the others change nothing, since masters exist from
    ``initialize`` on and amp itself knows when to skip. Other names can be assigned, too, and are kept.
    """

    __slots__ = ("_optimizer", "_record")
    _optimizer: Optimizer
    _record: Record

    def __init__(self, optimizer: Optimizer, record: Record) -> None:
        object.__setattr__(self, "_optimizer", optimizer)
        object.__setattr__(self, "_record", record)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for table in (_FLAGS, _LISTS_WITH_MASTERS if self._record.policy.master_weights else _LISTS_WITHOUT_MASTERS):
            if name in table:
                return table[name](self)
        try:
            return self._record.legacy[name]
        except KeyError:
            raise AttributeError(
                f"_amp_stash has no {name!r} at opt_level {self._record.policy.opt_level}; there are "
                + ", ".join(dir(self))
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LISTS_WITH_MASTERS or name in _LISTS_WITHOUT_MASTERS:
            raise AttributeError(
                f"_amp_stash.{name} follows optimizer.param_groups and cannot be assigned; change those"
            )
        if name == "params_have_scaled_gradients":
            session = current()
            scaled = value and session is not None and session.scalers
            self._record.grad_scale = session.scalers[0].scale if scaled and session is not None else 1.0
        elif name not in _FLAGS:
            self._record.legacy[name] = value

    def __dir__(self) -> list[str]:
        lists = _LISTS_WITH_MASTERS if self._record.policy.master_weights else _LISTS_WITHOUT_MASTERS
        return sorted([*_FLAGS, *lists, *self._record.legacy])

    def _groups(self, kind: str) -> list[list[Tensor]]:
        """Per parameter group: "model" parameters that have masters, their "master"s, or "fp32" ones without."""
        model_of = {id(pair.master_param): pair.model_param for pair in self._record.pairs}
        groups = []
        for group in self._optimizer.param_groups:
            if kind == "fp32":
                chosen = [p for p in group["params"] if id(p) not in model_of and p.requires_grad]
            else:
                masters = [p for p in group["params"] if id(p) in model_of]
                chosen = masters if kind == "master" else [model_of[id(p)] for p in masters]
            groups.append(chosen)
        return groups

    def _params(self, *, low_precision: bool) -> list[Tensor]:
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [p for p in params if (p.dtype in LOW_PRECISION) == low_precision]

    def _aside(self, params: list[Tensor]) -> list[Tensor | None]:
        aside = self._record.aside or {}
        return [aside[id(p)][1] if id(p) in aside else None for p in params]


_Getter = Callable[[AmpStash], Any]


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    return [p for group in groups for p in group]


_FLAGS: dict[str, _Getter] = {
    "lazy_init_called": lambda stash: True,
    "already_patched": lambda stash: stash._record.skip,
    "params_have_scaled_gradients": lambda stash: stash._record.grad_scale != 1.0,
    "process_zero_grad": lambda stash: True,
}
_LISTS_WITH_MASTERS: dict[str, _Getter] = {
    "fp16_groups": lambda stash: stash._groups("model"),
    "fp32_from_fp16_groups": lambda stash: stash._groups("master"),
    "fp32_from_fp32_groups": lambda stash: stash._groups("fp32"),
    "all_fp16_params": lambda stash: _flat(stash._groups("model")),
    "all_fp32_from_fp16_params": lambda stash: _flat(stash._groups("master")),
    "all_fp32_from_fp32_params": lambda stash: _flat(stash._groups("fp32")),
    "all_fp32_from_fp32_grad_stash": lambda stash: stash._aside(_flat(stash._groups("fp32"))),
}
_LISTS_WITHOUT_MASTERS: dict[str, _Getter] = {
    "all_fp16_params": lambda stash: stash._params(low_precision=True),
    "all_fp32_params": lambda stash: stash._params(low_precision=False),
    "all_fp16_grad_stash": lambda stash: stash._aside(stash._params(low_precision=True)),
    "all_fp32_grad_stash": lambda stash: stash._aside(stash._params(low_precision=False)),
}


class LegacyOptimizerNames(Optimizer):
    """Methods that Apex put on optimizers, and that recipes call."""

    _amp_record: Any

    @property
    def _amp_stash(self) -> AmpStash:
        return AmpStash(self, self._amp_record)

    def _amp_lazy_init(self) -> None:
        """Nothing: masters exist from ``initialize`` on."""

    def _lazy_init_maybe_master_weights(self) -> None:
        """Nothing: masters exist from ``initialize`` on."""

    def _master_params_to_model_params(self) -> None:
        """Round the masters, after they were written by hand, into the model."""
        copy_masters_to_model(self._amp_record.pairs)

    def _prepare_amp_backward(self) -> None:
        """Before one or several backwards that are scaled by hand: set the gradients of earlier ones aside."""
        record: Record = self._amp_record
        if record.aside is None:
            record.close_check()  # while there is something to look at
            settle(record, record.units(self))
            record.aside = set_grads_aside(record.units(self))

    def _post_amp_backward(self, loss_scaler: LossScaler) -> None:
        """After it: unscale the new gradients, bring them to the masters, and add the earlier ones."""
        record: Record = self._amp_record
        bring_grads(record.units(self), record.aside or {}, loss_scaler)
        record.aside = None
        record.grad_scale = 1.0
