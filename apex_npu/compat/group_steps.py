# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Support for subclasses with a ``_group_step(index)`` that steps a parameter group, as in Ascend's optimizers.

Such a method replaces the rule's ``update``. It reads flat tensors under the names that are private in Apex, and writes
to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from apex_npu.fusion import Run


class Combined(NamedTuple):
    """A group's tensors in one run: flat parameters, gradients, and states by name, with the step count as ``step``."""

    run: Run
    param: Tensor
    grad: Tensor
    state: dict[str, Any]


def follow_group_step(cls: Any) -> None:
    """Make ``cls`` update by ``_group_step``, unless the class that defines it, or an earlier one, has ``update``."""
    cls.reads_param_grads = _goes_by_group_step(cls)
    if cls.reads_param_grads and not hasattr(cls.before_updates, "notes_runs"):
        cls.before_updates, cls.update = _noting_runs(cls.before_updates), _update


def _noting_runs(inherited: Any) -> Any:
    def before_updates(self: Any, runs: list[tuple[Run, dict[str, Any]]]) -> None:
        inherited(self, runs)
        self._runs_by_group = {}
        for run, group in runs:
            self._runs_by_group.setdefault(id(group), []).append(run)

    before_updates.notes_runs = True  # type: ignore[attr-defined]
    return before_updates


def _goes_by_group_step(cls: Any) -> bool:
    owner = next(base for base in cls.__mro__ if not vars(base).keys().isdisjoint(("update", "_group_step")))
    return vars(owner).get("update", _update) is _update


def check_group_step(optimizer: Any) -> None:
    """Raise a TypeError for a ``_group_step`` that was assigned too late or is to be captured in a CUDA graph."""
    cls = type(optimizer)
    if "_group_step" in vars(optimizer) or (_goes_by_group_step(cls) and not cls.reads_param_grads):
        raise TypeError(
            f"{cls.__name__} has a _group_step that was assigned after the class was made: "
            "define it in the body of the class"
        )
    if cls.reads_param_grads and optimizer.capturable:
        raise TypeError(
            f"{cls.__name__} has a _group_step, which counts steps on the host: remove capturable, or define "
            "update(run, group) instead"
        )


def _update(self: Any, run: Run, group: dict[str, Any]) -> None:
    """Step all runs of ``group`` when called with the first of them."""
    runs = self._runs_by_group.pop(id(group), None)
    if runs is None:
        return
    index = next(i for i, each in enumerate(self.param_groups) if each is group)
    names = self.state_names(group)
    entries = [(self.state[p], run) for run in runs for p in run.params if p in self.state]
    counts = [(entry, entry["step"], run) for entry, run in entries if "step" in entry]
    # Only while the method runs, since the tensors keep the memory of the parameters in place.
    self.combined_by_group = [[] for _ in self.param_groups]
    self.combined_by_group[index] = combined = [_combine(run, names, self.scalar_states) for run in runs]
    try:
        self._group_step(index)
    finally:
        del self.combined_by_group
        # The step is counted here, whether or not the method has counted it on the parameters' states.
        for entry, count, run in counts:
            entry["step"] = count.fill_(run.step)
    for each in combined:
        _take(each.run.param, each.param)
        for name in names:
            _take(_state(each.run, name, self.scalar_states), each.state[name])


def _combine(run: Run, names: Sequence[str], scalar_states: Sequence[str]) -> Combined:
    state: dict[str, Any] = {name: _state(run, name, scalar_states).detach() for name in names}
    return Combined(run, run.param.detach(), run.grad.detach(), {"step": run.step - 1, **state})


def _state(run: Run, name: str, scalar_states: Sequence[str]) -> Tensor:
    return run.per_param(name) if name in scalar_states else run.state(name)


def _take(flat: Tensor, found: Tensor) -> None:
    """Copy ``found`` into ``flat`` if a method replaced the tensor (``x.data = …``) instead of writing to it."""
    if found.data_ptr() != flat.data_ptr():
        flat.copy_(found)
