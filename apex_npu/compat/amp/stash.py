# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names that scripts use on an optimizer adopted by amp: ``_amp_stash`` and the methods around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.optimizer_grads import any_raised, clear_saturation, read_and_clear_saturation, unscale
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.preconditions import check_plain
from apex_npu.amp.session import current, warn_once
from apex_npu.amp.widened_grads import WidenedGrads
from apex_npu.compat.amp.locked_list import LockedList
from apex_npu.compat.amp.scaler import LossScaler
from apex_npu.ops import LOW_PRECISION

Aside = dict[int, tuple[Tensor, Tensor]]


class Legacy:
    """The values kept with an optimizer for scripts that use Apex's private names.

    ``names`` holds what scripts have put into ``_amp_stash``. ``aside`` holds the gradients set aside for a backward
    that the script scales, or None.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.aside: Aside | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"names": self.names, "aside": None}

    def clear(self) -> None:
        """Note that the gradients have been cleared."""
        self.aside = None


def _legacy(state: AmpOptimizerState) -> Legacy:
    if state.legacy is None:
        state.legacy = Legacy()
    legacy: Legacy = state.legacy
    return legacy


def set_grads_aside(groups: list[GradGroup]) -> Aside:
    """Stash the current gradients for ``unscale_and_add``, so that a scaled backward does not add to them."""
    clear_saturation(groups)
    aside: Aside = {}
    for group in groups:
        if isinstance(group, WidenedGrads):
            group.begin_block(1.0, fuses=False)  # which it adds itself
        for param in group.params:
            if param.grad is not None:
                # A fused optimizer's gradient is a view of a buffer, into which the next gradient is gathered.
                aside[id(param)] = param, param.grad if group.flat is None else param.grad.clone()
                param.grad = None
    return aside


@torch.no_grad()
def unscale_and_add(groups: list[GradGroup], aside: Aside, scaler: LossScaler) -> None:
    """Unscale the backward's gradients by ``scaler``, and add the stashed ones."""
    saturated = scaler.dynamic and read_and_clear_saturation(groups)
    found_inf = any_raised(unscale(groups, scaler.loss_scale(), check=scaler.dynamic)) or saturated
    for param, grad in aside.values():
        param.grad = grad if param.grad is None else param.grad.add_(grad)
    scaler._has_overflow = scaler._has_overflow or found_inf


class AmpStash:
    """A live view, under Apex's names, of the state that amp keeps for an optimizer.

    The lists are built at each access and cannot be edited. The flags can be assigned.
    ``params_have_scaled_gradients`` says whether the present gradients are scaled, by the first loss scale. The other
    flags change nothing: float32 values exist from ``initialize`` on, and amp itself knows when to skip. Other names
    can be assigned as well and are kept.
    """

    __slots__ = ("_optimizer", "_state")
    _optimizer: Optimizer
    _state: AmpOptimizerState

    def __init__(self, optimizer: Optimizer, state: AmpOptimizerState) -> None:
        object.__setattr__(self, "_optimizer", optimizer)
        object.__setattr__(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _FLAGS:
            return _FLAGS[name](self._state)
        if name in _COMBINED and hasattr(self._optimizer, "combined_by_group"):
            by_group = self._optimizer.combined_by_group
            return _live([[getattr(each, _COMBINED[name]) for each in combined] for combined in by_group])
        if name in _COPIES and self._state.widens:
            copies = self._copies()
            return _live(copies if name == "fp32_from_fp16_groups" else _flat(copies))
        if name in (lists := self._lists()):
            return _live(lists[name])
        if name in (names := _legacy(self._state).names):
            return names[name]
        level = self._state.policy.opt_level
        raise AttributeError(f"_amp_stash has no {name!r} at opt_level {level}; there are {', '.join(dir(self))}")

    def __setattr__(self, name: str, value: Any) -> None:
        state, session = self._state, current()
        if name in _COPIES or name in self._lists():
            raise AttributeError(
                f"_amp_stash.{name} follows optimizer.param_groups and cannot be assigned; change those"
            )
        if name == "params_have_scaled_gradients":
            if value and session is not None and session.scalers:
                scale = session.scalers[0].scale
                if state.policy.fuse_unscale:
                    for group in state.grads.groups_of(self._optimizer):
                        group.scale_(scale / state.grad_scale)
                state.stage, state.grad_scale = Stage.DELAYED, scale
            elif state.stage is Stage.DELAYED:
                state.stage, state.grad_scale = Stage.UNSCALED, 1.0
        elif name not in _FLAGS:
            _legacy(state).names[name] = value

    def __dir__(self) -> list[str]:
        copies = _COPIES if self._state.widens else ()
        return sorted([*_FLAGS, *self._lists(), *copies, *_legacy(self._state).names])

    def _lists(self) -> dict[str, list[Any]]:
        """Return the lists that exist at this level."""
        aside = _legacy(self._state).aside or {}

        def stashed(params: list[Tensor]) -> list[Tensor | None]:
            return [aside[id(p)][1] if id(p) in aside else None for p in params]

        groups = [group["params"] for group in self._optimizer.param_groups]
        if not self._state.policy.master_weights:
            low = [p for p in _flat(groups) if p.dtype in LOW_PRECISION]
            wide = [p for p in _flat(groups) if p.dtype not in LOW_PRECISION]
            lists = {"all_fp16_params": low, "all_fp32_params": wide}
            return {**lists, "all_fp16_grad_stash": stashed(low), "all_fp32_grad_stash": stashed(wide)}
        have = set(map(id, self._state.masters.params()))
        models = [[p for p in params if id(p) in have] for params in groups]
        others = [[p for p in params if id(p) not in have and p.requires_grad] for params in groups]
        return {
            "fp16_groups": models,
            "fp32_from_fp32_groups": others,
            "all_fp16_params": _flat(models),
            "all_fp32_from_fp32_params": _flat(others),
            "all_fp32_from_fp32_grad_stash": stashed(_flat(others)),
        }

    def _copies(self) -> list[list[Tensor]]:
        """Return float32 copies of the 16-bit parameters of each group, with their gradients."""
        warn_once(self._optimizer, COPIES)
        return [[_float32_copy(self._state, p) for p in params] for params in self._lists()["fp16_groups"]]


def _float32_copy(state: AmpOptimizerState, param: Tensor) -> Tensor:
    low = param.detach()
    value = state.masters.float32(param, low)
    copy = low.float() if value is None else value
    copy.grad = param.grad if param.grad is None else param.grad.float()
    return copy


def _live(found: list[Any]) -> LockedList:
    return LockedList((_live(item) if isinstance(item, list) else item for item in found), _EDITS)


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    return [p for group in groups for p in group]


_EDITS = (
    "the lists of _amp_stash follow optimizer.param_groups and cannot be edited: change those (add_param_group makes "
    "masters), or edit a copy, list(...)"
)
_COPIES = ("fp32_from_fp16_groups", "all_fp32_from_fp16_params")
# Emitted once for each optimizer.
COPIES = (
    "_amp_stash.fp32_from_fp16_groups and all_fp32_from_fp16_params are float32 copies of the model's 16-bit "
    "parameters: writing to them has no effect. Write to the model's parameters; `with "
    "amp.float32_params(optimizer):` gives them their float32 values"
)
_FLAGS: dict[str, Callable[[AmpOptimizerState], bool]] = {
    "lazy_init_called": lambda state: True,
    "already_patched": lambda state: state.skip,
    "params_have_scaled_gradients": lambda state: state.awaits_block,
    "process_zero_grad": lambda state: True,
}
# Inside a ``_group_step`` of the script: what ``apex_npu.compat.group_steps`` has for each parameter group.
_COMBINED = {
    "combined_params_indexed_by_group": "param",
    "combined_grads_indexed_by_group": "grad",
    "combined_param_states_indexed_by_group": "state",
}


class LegacyOptimizerNames(Optimizer):
    """Accessors for the names that Apex put on optimizers and recipes use; see ``apex_npu.amp.accessors``."""

    _amp_state: Any

    @property
    def _amp_stash(self) -> AmpStash:
        return AmpStash(self, self._amp_state)

    @property
    def accelerate(self) -> bool:
        """Ascend's name for ``combine_grad``; without it ``combine_ddp`` averages nothing."""
        return bool(self._amp_state.policy.combine_grad)

    @accelerate.setter
    def accelerate(self, value: bool) -> None:
        if value:
            check_plain([self])
        self._amp_state.combine(combine_grad=bool(value))

    def _check_already_combined_params_and_grads(self) -> None:
        """Raise a TypeError before a copy of one of Ascend's optimizers steps: their steps begin with this call."""
        raise TypeError(
            f"{type(self).__name__} is a copy of one of Ascend's optimizers, which step tensors that Ascend's patch "
            "has combined. Import the one of apex.optimizers instead, or derive from that and keep the _group_step"
        )

    def _amp_lazy_init(self) -> None:
        """Do nothing: float32 values exist from ``initialize`` on, and writes to parameters count at once."""

    _lazy_init_maybe_master_weights = _master_params_to_model_params = _amp_lazy_init

    def _prepare_amp_backward(self) -> None:
        """Set the existing gradients aside before one or several backwards that the script scales."""
        state: AmpOptimizerState = self._amp_state
        if _legacy(state).aside is None:
            state.resolve()  # while the gradients are still in place
            groups = state.grads.groups_of(self)
            if state.pending is not None:
                state.pending.unscale_now_(state, groups)
            _legacy(state).aside = set_grads_aside(groups)

    def _post_amp_backward(self, loss_scaler: LossScaler) -> None:
        """Unscale the gradients of the backwards, and add the ones set aside."""
        state: AmpOptimizerState = self._amp_state
        unscale_and_add(state.grads.groups_of(self), _legacy(state).aside or {}, loss_scaler)
        _legacy(state).aside = None
        state.stage, state.grad_scale = Stage.READY, 1.0
