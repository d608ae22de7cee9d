# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``ShownState``: the views of buffers in ``optimizer.state``, and other values that users put there.

A ``rule`` is a ``FusedOptimizer``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex_npu.fusion import MASTER_PARAM, EncodedView, FusedGroup
from apex_npu.fusion.shards import local_part_as, sharded_like
from apex_npu.fusion.storage import SlotTable

# The number of applied steps of a parameter, for a rule whose state dict has no `step`. A device may have skipped
# steps, so the next step may still be the first. Random bits also depend on this number.
_COUNT = "applied_steps"


class StateSlot(NamedTuple):
    """The place of one parameter's state.

    Attributes:
        group: The parameter group.
        fused: The buffers.
        position: The index of the slot.
        param: The key in ``state``: the tensor in the slot, or the sharded parameter that it is a part of.
        names: The names of its states: those of the rule, then others.
    """

    group: dict[str, Any]
    fused: FusedGroup
    position: int
    param: Tensor
    names: tuple[str, ...]


class ShownState:
    """The dicts and views in ``optimizer.state`` that show buffers.

    Attributes:
        entries: The dicts, one for each parameter.
        views: Columns (dict, name, view), for one call that compares all of them in every step.
        new: The slots whose state has been shown for a first step, and that ``remember`` has not recorded yet.
        tensors: The views that are tensors. A script may give them other memory, as by ``v.data = v.data.to(device)``.
        table: Their places.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.views: tuple[list[dict[str, Any]], list[str], list[Tensor]] = ([], [], [])
        self.new: list[StateSlot] = []
        self.tensors: list[Tensor] = []
        self.table = SlotTable([])

    def adopt(self, rule: Any, slots: Iterable[StateSlot]) -> None:
        """Copy ``state``, from any source, into the buffers, and replace it by views of them."""
        slots = [slot for slot in slots if _is_counted(rule, slot)]
        if self.table.broken(self.tensors):
            for fused in {id(slot.fused): slot.fused for slot in slots}.values():
                fused.renew_views()
                fused.runs.counts.renew_views()
        self.entries, self.views = [], ([], [], [])  # if memory runs out below, the next step copies again
        entries = [rule.state.get(slot.param, {}) for slot in slots]
        counts = [_count_of(rule, slot, entry) for slot, entry in zip(slots, entries, strict=True)]
        rows = zip(slots, entries, counts, strict=True)
        with_state = [(slot, entry) for slot, entry, count in rows if count or _has_state(slot, entry)]
        values = _values_apart(rule, with_state)
        for slot, entry, count in zip(slots, entries, counts, strict=True):
            slot.fused.set_step(slot.position, count)
            is_new = not count and not _has_state(slot, entry)
            if is_new and MASTER_PARAM in slot.names and entry.get(MASTER_PARAM) is not None:
                _adopt_master(rule, slot, entry)
        for slot, entry in with_state:
            for name in slot.names:
                if entry.get(name) is None:
                    _reset(rule, slot, name)
                else:
                    _copied(_view(rule, slot, name), values[id(slot.param), name], slot.param)
            _show(rule, slot)
        self.remember(rule, slots)

    def show_state(self, rule: Any, slot: StateSlot) -> None:
        """Show the state of a slot that is about to be stepped for the first time."""
        entry = rule.state.get(slot.param, {})
        missing = [name for name in slot.names if entry.get(name) is None]
        # If none is missing, a script has set the count of existing state to 0.
        is_new = slot.fused.runs.counts.is_new(slot.position) and (missing or not entry.keys() & {"step", _COUNT})
        if is_new:
            for name in missing:
                _reset(rule, slot, name)
        slot.fused.use(slot.position)
        if is_new:
            _show(rule, slot)
            self.new.append(slot)

    def hide_unstepped(self, rule: Any) -> None:
        """Remove state that ``show_state`` has added, after a failed step.

        Otherwise a state dict would save it, and rules without a ``step`` would regard the parameter as stepped.
        Remainders of masters stay, because they existed before the step.
        """
        for slot in self.new:
            entry = rule.state.get(slot.param)
            if entry and slot.fused.runs.counts.is_new(slot.position):
                for name in {"step", _COUNT, *slot.names}.difference(slot.fused.own_states):
                    entry.pop(name, None)
                if not entry:
                    del rule.state[slot.param]
                slot.fused.runs.forget()  # so that it is shown again

    def remember(self, rule: Any, slots: Iterable[StateSlot]) -> None:
        """Record the views of ``slots``, with which ``state`` is compared in later steps."""
        entries = list(rule.state.values())
        rows = [
            (entry, name, value)
            for slot in slots
            if (entry := rule.state.get(slot.param))
            for name in ("step", _COUNT, *slot.names)
            if (value := entry.get(name)) is not None
        ]
        views = ([entry for entry, _, _ in rows], [name for _, name, _ in rows], [view for _, _, view in rows])
        self.entries, self.views, self.new = entries, views, []
        self.tensors = [view for view in views[2] if type(view) is Tensor]
        self.table = SlotTable(self.tensors)


def saved(rule: Any, *, encoded: bool) -> dict[Any, Any]:
    """Return the state of ``rule`` with tensors, or with ``encoded`` dicts of tensors, instead of encoded states.

    A parameter with a master that has not been stepped also gets the state of step 0, because other optimizers expect
    complete entries. A state whose format the next step changes is a tensor, which an optimizer loads in any format.
    """
    groups = {param: group for group in rule.param_groups for param in group["params"]}
    formats = _formats_of_groups(rule) if encoded else {}
    shown = {}
    for param, entry in rule.state.items():
        if param not in groups and entry.keys() <= {MASTER_PARAM, _COUNT}:
            continue  # a script has removed it from all groups; for other states torch raises an error
        is_new = entry.keys() == {MASTER_PARAM}
        kept = formats.get(id(groups.get(param)), {})
        before = _state_before_first_step(rule, groups[param], param) if is_new else {}
        tensors = {
            name: _saved(value, param, kept.get(name)) if isinstance(value, EncodedView) else value
            for name, value in entry.items()
        }
        shown[param] = {**before, **tensors}
    return shown


def _formats_of_groups(rule: Any) -> dict[int, dict[str, torch.dtype]]:
    wider = rule.state_formats.are_too_narrow(rule.param_groups)
    return {id(group): rule.state_formats.kept_in(rule.state_names(group), wider=wider) for group in rule.param_groups}


def _saved(view: EncodedView, param: Tensor, encoded_as: torch.dtype | None) -> Any:
    return view.stored() if view.stored_dtype == encoded_as else sharded_like(view.dequantize(), param)


def _state_before_first_step(rule: Any, group: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
    like = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
    state = {"step" if rule.shows_step(group) else _COUNT: torch.zeros((), dtype=torch.float32)}
    for name in rule.state_names(group):
        shaped = like.new_empty(()) if name in rule.scalar_states else like.clone()
        state[name] = shaped.fill_(rule.initial_state(name, group))
    return state


def _copied(view: Tensor, value: Any, param: Tensor) -> Tensor:
    """Copy ``value`` into ``view``, and return ``view``."""
    value = local_part_as(value, param)
    if value is not view:
        # The state may have been encoded before, and not now.
        view.copy_(value.dequantize() if isinstance(value, EncodedView) and isinstance(view, Tensor) else value)
    return view


def _values_apart(rule: Any, stepped: list[tuple[StateSlot, dict[str, Any]]]) -> dict[tuple[int, str], Any]:
    """Return the states by parameter and name. Those that a script has put there from other slots are copies."""
    rows = [(slot, name, entry[name]) for slot, entry in stepped for name in slot.names if entry.get(name) is not None]
    places = {id(_view(rule, slot, name)): (id(slot.param), name) for slot, name, _ in rows}
    found = {}
    for slot, name, value in rows:
        place = id(slot.param), name
        part: Any = local_part_as(value, slot.param)
        if places.get(id(part), place) != place:
            part = part.dequantize() if isinstance(part, EncodedView) else part.clone()
        found[place] = part
    return found


def _view(rule: Any, slot: StateSlot, name: str) -> Tensor:
    return slot.fused.state_views(name, scalar=name in rule.scalar_states)[slot.position]


def _shown_view(rule: Any, slot: StateSlot, name: str) -> Any:
    """Return the object that ``state`` shows to users."""
    view: Any = _view(rule, slot, name)
    if isinstance(view, EncodedView):
        return view
    return view if name in rule.scalar_states else sharded_like(view, slot.param)


def _adopt_master(rule: Any, slot: StateSlot, entry: dict[str, Any]) -> None:
    """Copy a master, the only state that exists before the first step of its parameter."""
    _copied(_view(rule, slot, MASTER_PARAM), entry[MASTER_PARAM], slot.param)
    if slot.fused.own_states:  # ``saved`` adds the state of step 0
        for name in ("step", _COUNT, *slot.names):
            entry.pop(name, None)
    entry[MASTER_PARAM] = _shown_view(rule, slot, MASTER_PARAM)


def _reset(rule: Any, slot: StateSlot, name: str) -> None:
    scalar, initial = name in rule.scalar_states, rule.initial_state(name, slot.group)
    slot.fused.reset_state(name, slot.position, initial, scalar=scalar)


def _is_counted(rule: Any, slot: StateSlot) -> bool:
    return bool(slot.names) or slot.fused.counts_always or rule.shows_step(slot.group)


def _count_of(rule: Any, slot: StateSlot, entry: dict[str, Any]) -> float:
    """Return the step count of the state ``entry``; for a rule without a count, 0 before the first step, else 1."""
    if rule.shows_step(slot.group):
        return float(entry.get("step", 0.0))
    names = rule.state_names(slot.group)
    has_state = any(entry.get(name) is not None for name in names)
    if names or not slot.fused.counts_always:
        return float(entry.get(_COUNT, 1.0)) if has_state else 0.0
    return float(entry.get(_COUNT, 0.0))  # the count is the only state


def _has_state(slot: StateSlot, entry: dict[str, Any]) -> bool:
    """Return True if ``entry`` has state in addition to a master, which exists before the first step."""
    return any(entry.get(name) is not None for name in slot.names if name != MASTER_PARAM)


def _show(rule: Any, slot: StateSlot) -> None:
    """Set the buffers' views in the parameter's entry of ``state``. Other items that a user put there stay."""
    if not _is_counted(rule, slot):
        return
    views = {name: _shown_view(rule, slot, name) for name in slot.names}
    entry, count = rule.state[slot.param], slot.fused.runs.counts.view(slot.position)
    if rule.shows_step(slot.group):
        entry["step"] = count
    elif _COUNT in entry or count.device.type != "cpu" or slot.fused.encoding is not None:  # random bits depend on it
        entry[_COUNT] = count
    entry.update(views)
