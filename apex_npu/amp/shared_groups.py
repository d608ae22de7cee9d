# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that share their ``param_groups`` with another inside of them, as SAM does with its base optimizer.

Both are adopted with one state: a step of the inner one that the script calls by itself is skipped after an overflow,
and brings masters to the model; one that the outer one's step calls is a part of that.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from apex_npu.amp.amp_optimizer import AmpOptimizerMixin, adopted_class
from apex_npu.amp.optimizer_state import state_of
from apex_npu.backends._torch_private import disable_dynamo


class SharedGroupsMixin(AmpOptimizerMixin):
    """An optimizer that has another inside, or is inside of it."""

    _amp_stepping: list[Optimizer]

    @disable_dynamo
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """See ``AmpOptimizerMixin``; inside of a step of the other it is the optimizer's own."""
        stepping = self._amp_stepping
        if stepping:
            return super(AmpOptimizerMixin, self).step(*args, **kwargs)
        try:
            stepping.append(self)  # type: ignore[arg-type]
            return super().step(*args, **kwargs)
        finally:
            stepping.clear()

    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def optimizers_inside(optimizer: Any) -> list[Optimizer]:
    """Those that are attributes of ``optimizer``, or items of one."""
    found: list[Optimizer] = []
    for value in vars(optimizer).values():
        listed = value if isinstance(value, (list, tuple)) else [value]
        found += [inner for inner in listed if isinstance(inner, Optimizer) and inner is not optimizer]
    return found


def shares_groups(optimizer: Optimizer, inner: Optimizer) -> bool:
    """True where all groups of ``inner`` are groups of ``optimizer``."""
    groups = set(map(id, optimizer.param_groups))
    return all(id(group) in groups for group in inner.param_groups)


def adopt_inside(optimizer: Optimizer) -> None:
    """Adopt the optimizers inside of ``optimizer``, which has been adopted, that share its groups."""
    state = state_of(optimizer)
    found = [o for o in optimizers_inside(optimizer) if state_of(o) is None and shares_groups(optimizer, o)]
    if state is None or not found:
        return
    stepping: list[Optimizer] = []
    for inner in found:
        vars(inner).pop("step", None)
        for pair in state.pairs:
            if pair.model_param in inner.state:
                inner.state[pair.master_param] = inner.state.pop(pair.model_param)
        vars(inner).update(_amp_state=state, _amp_stepping=stepping)
        inner.__class__ = adopted_class(type(inner), SharedGroupsMixin)
    vars(optimizer)["_amp_stepping"] = stepping
    optimizer.__class__ = adopted_class(type(optimizer).__bases__[1], SharedGroupsMixin)


def release_inside(optimizer: Optimizer) -> None:
    """Take ``adopt_inside`` back."""
    state = state_of(optimizer)
    for inner in optimizers_inside(optimizer):
        if state is None or state_of(inner) is not state:
            continue
        for pair in state.pairs:
            if pair.master_param in inner.state:
                inner.state[pair.model_param] = inner.state.pop(pair.master_param)
        if isinstance(inner, SharedGroupsMixin):
            inner.__class__ = type(inner).__bases__[1]
        vars(inner).pop("_amp_state", None)
        vars(inner).pop("_amp_stepping", None)
    vars(optimizer).pop("_amp_stepping", None)
