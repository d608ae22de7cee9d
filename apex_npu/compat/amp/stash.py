# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What scripts touch on an optimizer that amp has adopted: ``_amp_stash`` and the methods around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.grad_groups import GradGroup, any_raised, unscale
from apex_npu.amp.master_grads import MasterGradGroup
from apex_npu.amp.master_params import copy_masters_to_model
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.preconditions import check_plain
from apex_npu.amp.saturation import clear_saturation, read_and_clear_saturation
from apex_npu.amp.session import current
from apex_npu.compat.amp.scaler import LossScaler
from apex_npu.ops import LOW_PRECISION

Aside = dict[int, tuple[Tensor, Tensor]]


class Legacy:
    """What is kept with an optimizer for scripts that use Apex's private names.

    Attributes:
        names: What they have put into ``_amp_stash``.
        aside: Gradients that make way for a backward that the script scales; None: there is none.
    """

    def __init__(self, names: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.names = dict(names)
        self.aside: Aside | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"names": self.names, "aside": None}

    def clear(self) -> None:
        """The gradients have been cleared."""
        self.aside = None


def _legacy(state: AmpOptimizerState) -> Legacy:
    if state.legacy is None:
        state.legacy = Legacy()
    legacy: Legacy = state.legacy
    return legacy


# ----------------------------------------------------------------------------------------- explicit gradient handling


def set_grads_aside(groups: list[GradGroup]) -> Aside:
    """Stash the gradients that are there, so that a scaled backward does not add to them.

    Returns:
        The stashed gradients, for ``unscale_and_add``. (Masters keep theirs: backward does not write there.)
    """
    clear_saturation(groups)
    aside: Aside = {}
    for group in groups:
        if isinstance(group, MasterGradGroup):
            group.drop_cleared()
            group.copied.put_aside()
        for param, source in zip(group.params, group.sources, strict=True):
            if param is source and param.grad is not None:
                # A fused optimizer's gradient is a view of a buffer, into which the next one will be gathered.
                aside[id(param)] = param, param.grad if group.flat is None else param.grad.clone()
                param.grad = None
    return aside


@torch.no_grad()
def unscale_and_add(groups: list[GradGroup], aside: Aside, scaler: LossScaler) -> None:
    """Unscale the gradients of the backward, copy them to the masters, and add the stashed gradients.

    Args:
        groups: As for ``set_grads_aside``.
        aside: What that returned.
        scaler: Its scale is that of the gradients, and an overflow is recorded there.
    """
    saturated = scaler.dynamic and read_and_clear_saturation(groups)
    found_inf = any_raised(unscale(groups, scaler.loss_scale(), check=scaler.dynamic)) or saturated
    for param, grad in aside.values():
        param.grad = grad if param.grad is None else param.grad.add_(grad)
    scaler._has_overflow = scaler._has_overflow or found_inf


# ------------------------------------------------------------------------------------------------------------ the stash


class LiveList(list[Any]):
    """A list that is made at each look, so that what a script did to it would be lost: it says so instead.

    An element can be assigned that is there already: scripts that exchange a parameter do so in ``param_groups`` first.
    """

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice) or self[index] is not value:
            self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "the lists of _amp_stash follow optimizer.param_groups and cannot be edited: change those (add_param_group "
            "makes masters), or edit a copy, list(...)"
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> Any:
        return list, (list(self),)


class AmpStash:
    """A live view of amp's state of an optimizer, under Apex's names.

    The lists are built at each access, and cannot be edited. The flags can be assigned:
    ``params_have_scaled_gradients`` says whether the gradients that are there are scaled (by the first loss scale); the
    others change nothing, since masters exist from ``initialize`` on and amp itself knows when to skip. Other names can
    be assigned, too, and are kept.
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
        for table in (_FLAGS, _LISTS_WITH_MASTERS if self._state.policy.master_weights else _LISTS_WITHOUT_MASTERS):
            if name in table:
                return table[name](self) if table is _FLAGS else _live(table[name](self))
        if name in _COMBINED and hasattr(self._optimizer, "combined_by_group"):
            by_group = self._optimizer.combined_by_group
            return _live([[getattr(each, _COMBINED[name]) for each in combined] for combined in by_group])
        try:
            return _legacy(self._state).names[name]
        except KeyError:
            raise AttributeError(
                f"_amp_stash has no {name!r} at opt_level {self._state.policy.opt_level}; there are "
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
            if scaled and session is not None:
                scale = session.scalers[0].scale
                if self._state.policy.fuse_unscale:
                    for group in self._state.grad_groups(self._optimizer):
                        group.scale_(scale / self._state.grad_scale)
                self._state.stage, self._state.grad_scale = Stage.DELAYED, scale
            elif self._state.stage is Stage.DELAYED:
                self._state.stage, self._state.grad_scale = Stage.UNSCALED, 1.0
        elif name not in _FLAGS:
            _legacy(self._state).names[name] = value

    def __dir__(self) -> list[str]:
        lists = _LISTS_WITH_MASTERS if self._state.policy.master_weights else _LISTS_WITHOUT_MASTERS
        return sorted([*_FLAGS, *lists, *_legacy(self._state).names])

    def _groups(self, kind: str) -> list[list[Tensor]]:
        """Per parameter group: "model" parameters that have masters, their "master"s, or "fp32" ones without."""
        model_of = {id(pair.master_param): pair.model_param for pair in self._state.pairs}
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
        aside = _legacy(self._state).aside or {}
        return [aside[id(p)][1] if id(p) in aside else None for p in params]


_Getter = Callable[[AmpStash], Any]


def _live(found: list[Any]) -> LiveList:
    return LiveList(LiveList(item) if isinstance(item, list) else item for item in found)


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    return [p for group in groups for p in group]


_FLAGS: dict[str, _Getter] = {
    "lazy_init_called": lambda stash: True,
    "already_patched": lambda stash: stash._state.skip,
    "params_have_scaled_gradients": lambda stash: stash._state.awaits_block,
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
# In a ``_group_step`` of the script's own: what ``apex_npu.compat.group_steps`` has for each parameter group.
_COMBINED = {
    "combined_params_indexed_by_group": "param",
    "combined_grads_indexed_by_group": "grad",
    "combined_param_states_indexed_by_group": "state",
}


class LegacyOptimizerNames(Optimizer):
    """Accessors: what Apex put on optimizers, and recipes use; see ``apex_npu.amp.accessors``."""

    _amp_state: Any

    @property
    def _amp_stash(self) -> AmpStash:
        return AmpStash(self, self._amp_state)

    @property
    def accelerate(self) -> bool:
        """What Ascend's patch calls ``combine_grad``; without it ``combine_ddp`` averages nothing."""
        return bool(self._amp_state.policy.combine_grad)

    @accelerate.setter
    def accelerate(self, value: bool) -> None:
        if value:
            check_plain([self])
        self._amp_state.combine(combine_grad=bool(value))

    def _check_already_combined_params_and_grads(self) -> None:
        """With this call the steps of Ascend's optimizers begin, and of the copies of them that scripts bring along.

        Raises:
            TypeError: Always; nothing has been updated.
        """
        raise TypeError(
            f"{type(self).__name__} is a copy of one of Ascend's optimizers, which step tensors that Ascend's patch "
            "has combined. Import the one of apex.optimizers instead, or derive from that and keep the _group_step"
        )

    def _amp_lazy_init(self) -> None:
        """Nothing: masters exist from ``initialize`` on."""

    def _lazy_init_maybe_master_weights(self) -> None:
        """Nothing: masters exist from ``initialize`` on."""

    def _master_params_to_model_params(self) -> None:
        """Round the masters, after they were written by the script, into the model."""
        copy_masters_to_model(self._amp_state.pairs)

    def _prepare_amp_backward(self) -> None:
        """Before one or several backwards that the script scales: set the gradients of earlier ones aside."""
        state: AmpOptimizerState = self._amp_state
        if _legacy(state).aside is None:
            state.resolve()  # while there is something to look at
            groups = state.grad_groups(self)
            if state.pending is not None:
                state.pending.unscale_now_(state, groups)
            _legacy(state).aside = set_grads_aside(groups)

    def _post_amp_backward(self, loss_scaler: LossScaler) -> None:
        """After it: unscale the new gradients, copy them to the masters, and add the earlier ones."""
        state: AmpOptimizerState = self._amp_state
        unscale_and_add(state.grad_groups(self), _legacy(state).aside or {}, loss_scaler)
        _legacy(state).aside = None
        state.stage, state.grad_scale = Stage.READY, 1.0
