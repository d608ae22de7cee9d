# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What one entry of ``param_groups`` has been fused into, and how that follows what users do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from apex_npu.distributed import is_sharded, local_grad, local_part
from apex_npu.fusion import FusedGroup, are_same, fuse, give_own_storages, is_slot, not_combinable, step_in_place
from apex_npu.optimizers.checks import can_be_stepped, check_params


class FusedParamGroup:
    """The fused groups of one parameter group.

    Attributes:
        groups: In them every parameter that is trainable, or has had a gradient, in the order of the list. Of a
            sharded one they hold this process's part.
        owners: ``id(part)`` → the sharded parameter that it is part of.
        listed: The list of the parameter group, as it was fused.
        unfused: Those of them that are in no group: frozen so far.
        state_names: What the rule keeps for them.
    """

    def __init__(self, *, capturable: bool = False) -> None:
        """Nothing is fused yet; see ``fuse`` for ``capturable``."""
        self._capturable = capturable
        self.groups: list[FusedGroup] = []
        self.owners: dict[int, Tensor] = {}
        self.listed: list[Tensor] = []
        self.unfused: list[Tensor] = []
        self.state_names: tuple[str, ...] = ()
        self._params: list[Tensor] = []
        self._moving: set[int] = set()

    def owner_of(self, param: Tensor) -> Tensor:
        """What the user has where ``groups`` have ``param``: that itself, or the parameter that it is a part of."""
        return self.owners.get(id(param), param)

    def owners_of(self, parts: list[Tensor]) -> list[Tensor]:
        """The sharded parameters that any of ``parts`` are parts of."""
        return [self.owners[id(p)] for p in parts if id(p) in self.owners]

    def bring_gradients(self) -> None:
        """Give the parts of sharded parameters the gradients that these have.

        Raises:
            RuntimeError: One is no DTensor.
        """
        for param in self._params:
            owner = self.owner_of(param)
            if owner is not param:
                param.grad = local_grad(owner)

    def follow(
        self, params: list[Tensor], state_names: tuple[str, ...], report: Callable[[list[Tensor]], None]
    ) -> bool:
        """Fit the groups to ``params`` as they are now; where that fails, or is interrupted, nothing is noted.

        Args:
            params: The list of the parameter group.
            state_names: What its rule keeps.
            report: Called with the parameters that have left their slots, if any have, before anything changes.

        Returns:
            True where buffers have been replaced, or their states are others: then state has to be brought along.

        Raises:
            TypeError: A trainable parameter has a dtype that cannot be fused.
        """
        known = {id(p) for group in self.groups for p in group.params}
        moved = [group.broken() for group in self.groups]
        left = [group.params[i] for group, found in zip(self.groups, moved, strict=True) for i in found]
        if any(id(p) not in self._moving for p in left):
            report(left)
        parts = [local_part(p) for p in params]
        owners = {id(part): p for part, p in zip(parts, params, strict=True) if is_sharded(p)}
        groups = self._still_fit(moved, {id(p) for p in parts})
        unfused = _without_members(parts, groups)
        if any(owners.get(id(p), p).requires_grad and not can_be_stepped(p) for p in unfused):
            check_params(params)  # says which
        ready = _ready(unfused, owners)
        # What replaces a parameter may do so in every step (partial FC): the others keep a group without it.
        self._moving = {id(p) for p in ready}
        there, others = ([p for p in ready if (id(p) in known) is held] for held in (True, False))
        groups += fuse(there, apart=others, capturable=self._capturable)
        unfused = _without_members(unfused, groups)
        # Parameters that share memory are stepped one after the other: in the order of the list, as torch does.
        place = {id(p): i for i, p in enumerate(parts)}
        groups.sort(key=lambda group: min(place[id(p)] for p in group.params))
        same = are_same(groups, self.groups) and are_same(parts, self._params) and are_same(params, self.listed)
        same = same and state_names == self.state_names
        listed = list(params)
        # All at once: an interrupt between two of them would leave parameters that no later call steps, or twice.
        self.groups, self.unfused, self.owners = groups, unfused, owners
        self.listed, self._params, self.state_names, self._moving = listed, parts, state_names, set()
        return not same

    def combinable_params(self) -> list[Tensor]:
        """Those that are fused, in the order of the list.

        Raises:
            RuntimeError: One of them is in another optimizer's buffer, which would take it back.
        """
        held = {id(p): group.owns_memory for group in self.groups for p in group.params}
        fused = [p for p in self._params if id(p) in held]
        for p in fused:
            if not held[id(p)] and is_slot(p):
                raise not_combinable(p)
        return fused

    @contextmanager
    def without_those_in_place(self) -> Iterator[None]:
        """Give up the groups of what has not been moved, so that it can be; they are back where nothing is released."""
        groups, unfused = self.groups, self.unfused
        in_place = [group for group in groups if not group.owns_memory]
        self.unfused = [*unfused, *(p for group in in_place for p in group.params)]
        self.groups = owning = [group for group in groups if group.owns_memory]
        for group in in_place:
            group.let_go()
        try:
            yield
        finally:
            if self.groups is owning:
                for group in in_place:
                    group.hold_again()
                self.groups, self.unfused = groups, unfused

    def release(self) -> None:
        """Forget all groups: what is not taken by others is fused again at the next step."""
        self.unfused = [*self.unfused, *(p for group in self.groups for p in group.params)]
        self.groups = []

    def take(self, group: FusedGroup) -> None:
        """Have ``group``, of parameters that have been released."""
        held = {id(p) for p in group.params}
        self.groups.append(group)
        self.unfused = [p for p in self.unfused if id(p) not in held]

    def is_rarely_outdated(self) -> bool:
        """True where a sharded parameter has another part now, or one that was frozen takes part.

        Called only where there are such.
        """
        parts = self.owners and [local_part(p) for p in self.listed]
        return bool(parts and not are_same(parts, self._params)) or bool(_ready(self.unfused, self.owners))

    def _still_fit(self, moved: list[list[int]], listed: set[int]) -> list[FusedGroup]:
        """The groups of which all parameters are ``listed``, and none has ``moved``.

        A parameter that another fusion has taken gets a group in place: taking it back would only start a tug-of-war.
        """
        groups: list[FusedGroup] = []
        for group, found in zip(self.groups, moved, strict=True):
            if not found and all(id(p) in listed for p in group.params):
                groups.append(group)
                continue
            if group.owns_memory:
                give_own_storages([p for i, p in enumerate(group.params) if i not in found])
            others = list(map(group.params.__getitem__, found))
            # Those that a call moved which could not end are in no group.
            give_own_storages([p for p in others if id(p) in self._moving])
            others = [p for p in others if id(p) not in self._moving]
            taken = [p for p in others if is_slot(p) and id(p) in listed]
            groups.extend(step_in_place(p, capturable=self._capturable) for p in taken)
        return groups


def _without_members(params: list[Tensor], groups: list[FusedGroup]) -> list[Tensor]:
    """Those of ``params`` that are in none of ``groups``."""
    held = {id(p) for group in groups for p in group.params}
    return [p for p in params if id(p) not in held]


def _ready(unfused: list[Tensor], owners: dict[int, Tensor]) -> list[Tensor]:
    """Those that take part in a step, or have."""
    return [p for p in unfused if _takes_part(owners.get(id(p), p)) and can_be_stepped(p)]


def _takes_part(param: Tensor) -> bool:
    return param.requires_grad or param.grad is not None
