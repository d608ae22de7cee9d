# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What one entry of ``param_groups`` has been fused into, and how that follows what users do to it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from apex_npu.fusion import FusedGroup, are_same, fuse, is_sharded, is_slot, local_grad, local_part, step_in_place
from apex_npu.optimizers.checks import can_be_stepped, check_params


class FusedParamGroup:
    """The fused groups of one parameter group.

    Attributes:
        groups: In them every parameter that is trainable, or has had a gradient, in the order of the list. Of a
            sharded one they hold this process's part.
        owners: ``id(part)`` → the sharded parameter that it is part of.
    """

    def __init__(self, *, capturable: bool = False) -> None:
        """Nothing is fused yet; see ``fuse`` for ``capturable``."""
        self._capturable = capturable
        self.groups: list[FusedGroup] = []
        self.owners: dict[int, Tensor] = {}
        self._listed: list[Tensor] = []
        self._params: list[Tensor] = []
        self._unfused: list[Tensor] = []  # frozen so far
        self._state_names: tuple[str, ...] = ()

    def owner_of(self, param: Tensor) -> Tensor:
        """What the user has where ``groups`` have ``param``: that itself, or the parameter that it is a part of."""
        return self.owners.get(id(param), param)

    def holds_all(self, params: list[Tensor]) -> bool:
        """True where ``groups`` are made of ``params``, the list of the parameter group, and of nothing else."""
        return not self._unfused and self._is_listed(params)

    def bring_gradients(self) -> None:
        """Give the parts of sharded parameters the gradients that these have.

        Raises:
            RuntimeError: One is no DTensor.
        """
        for param in self._params if self.owners else ():
            owner = self.owner_of(param)
            if owner is not param:
                param.grad = local_grad(owner)

    def follow(
        self, params: list[Tensor], state_names: tuple[str, ...], report: Callable[[list[Tensor]], None]
    ) -> bool:
        """Fit the groups to ``params`` as they are now.

        Args:
            params: The list of the parameter group.
            state_names: What its rule keeps.
            report: Told of the parameters that have left their slots, if any have, before anything changes.

        Returns:
            True where buffers have been replaced, or their states are others: then state has to be brought along.

        Raises:
            TypeError: A trainable parameter has a dtype that cannot be fused.
        """
        broken = [(group, found) for group in self.groups if (found := group.broken())]
        if broken:
            report([group.params[i] for group, found in broken for i in found])
        changed = self._follow_list(params)
        outdated = [group for group, _ in broken if group in self.groups]
        if outdated:
            self._take_apart(outdated)
            changed = True
        if any(self.owner_of(p).requires_grad and not can_be_stepped(p) for p in self._unfused):
            check_params(params)  # says which
        ready = self._ready()
        if ready:
            self.groups.extend(fuse(ready, capturable=self._capturable))
            held = {id(p) for p in ready}
            self._unfused = [p for p in self._unfused if id(p) not in held]
            changed = True
        if state_names != self._state_names:
            self._state_names = state_names
            changed = True
        if changed:
            # Parameters that share memory are stepped one after the other: in the order of the list, as torch does.
            place = {id(p): i for i, p in enumerate(self._params)}
            self.groups.sort(key=lambda group: min(place[id(p)] for p in group.params))
        return changed

    def is_current(self, params: list[Tensor], state_names: tuple[str, ...]) -> bool:
        """True where ``follow`` would change nothing."""
        return (
            self._is_listed(params)
            and are_same([local_part(p) for p in params], self._params)
            and state_names == self._state_names
            and not self._ready()
            and not any(group.broken() for group in self.groups)
        )

    def _ready(self) -> list[Tensor]:
        return [p for p in self._unfused if self._takes_part(self.owner_of(p)) and can_be_stepped(p)]

    @staticmethod
    def _takes_part(param: Tensor) -> bool:
        return param.requires_grad or param.grad is not None

    def _is_listed(self, params: list[Tensor]) -> bool:
        return are_same(params, self._listed)

    def _follow_list(self, params: list[Tensor]) -> bool:
        """Take note of parameters that have been added, removed or replaced."""
        same = self._is_listed(params)
        if same and not self.owners:
            return False
        parts = [local_part(p) for p in params]
        if same and are_same(parts, self._params):
            return False
        self._listed, self._params = list(params), parts
        self.owners = {id(part): p for part, p in zip(parts, params, strict=True) if is_sharded(p)}
        listed = {id(p) for p in parts}
        self._take_apart([group for group in self.groups if not all(id(p) in listed for p in group.params)])
        held = {id(p) for group in self.groups for p in group.params}
        self._unfused = [p for p in parts if id(p) not in held]
        return True

    def _take_apart(self, outdated: list[FusedGroup]) -> None:
        """Drop ``outdated`` groups; their parameters are fused again with those that await it."""
        listed = {id(p) for p in self._params}
        for group in outdated:
            # What another fusion has taken stays there: taking it back would only start a tug-of-war.
            taken = {i for i in group.broken() if is_slot(group.params[i]) and id(group.params[i]) in listed}
            self.groups.remove(group)
            self.groups.extend(step_in_place(group.params[i], capturable=self._capturable) for i in sorted(taken))
            self._unfused.extend(p for i, p in enumerate(group.params) if i not in taken)
