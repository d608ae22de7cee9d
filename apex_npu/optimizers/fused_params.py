# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The buffers of an optimizer's parameters, which follow changes of the parameters by users.

A sharded parameter is not fused itself, but this process's part of it, for which it is the full one. Likewise with
``state_device`` the host copy of an accelerator's parameter is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

from torch import Tensor

from apex_npu.distributed.shard_grads import ShardGrads, finds_parts, memory_of_parts, wait_for_moved_parts
from apex_npu.fusion import FlatGrads, FusedGroup, are_same, fuse, is_dense, is_slot, not_combinable
from apex_npu.fusion.fused_group import step_in_place
from apex_npu.fusion.group_buffers import OwnGrad
from apex_npu.fusion.host_grads import HostGrads, host_copy_of
from apex_npu.fusion.shards import cut_of, is_sharded, local_part
from apex_npu.optimizers.checks import can_be_stepped, check_params, takes_part

PartGrads: TypeAlias = ShardGrads | OwnGrad | HostGrads


class FusedParams:
    """The fused groups of an optimizer. A "group" here is a ``FusedGroup``, not an entry of ``param_groups``.

    Attributes:
        groups: In them every parameter that is trainable, or has had a gradient, in the order of the lists; or the part
            that stands for it.
        full_params: ``id(part)`` → the parameter that it stands for.
        shards: The gradients of those groups that have parts of sharded parameters, or host copies.
        hosted: The gradients of those groups that have host copies.
        listed: The lists of ``param_groups``, as they were fused.
        unfused: Their parameters that are in no group, because they have been frozen so far.
        state_names: The names of the states of each entry of ``param_groups``.
        capturable: The argument of ``fuse``.
    """

    def __init__(self, *, on_host: bool = False, in_chunks: bool = True) -> None:
        """Fuse nothing yet.

        Args:
            on_host: Step an accelerator's parameters on the host.
            in_chunks: Step some of them while gradients of others arrive. A rule with norms adds up all of them first,
                and its sums have the same bits only if they are not divided.
        """
        self.capturable = False
        self._on_host, self._in_chunks = on_host, in_chunks
        self._copies: dict[int, Tensor] = {}  # the host copies, by the identity of their parameters
        self.hosted: list[HostGrads] = []
        self.groups: list[FusedGroup] = []
        self.full_params: dict[int, Tensor] = {}
        self.shards: list[PartGrads] = []
        self.listed: list[list[Tensor]] = []
        self.unfused: list[Tensor] = []
        self.state_names: list[tuple[str, ...]] = []
        self._params: list[Tensor] = []
        self._combined = False
        self._moving: set[int] = set()

    def full_param_of(self, param: Tensor) -> Tensor:
        """Return the user's parameter for ``param`` of ``groups``: itself, or the parameter that it is a part of."""
        return self.full_params.get(id(param), param)

    def apart(self) -> list[Tensor]:
        """The parameters whose gradients are in no buffer: those that do not move, or are stepped on the host."""
        found = [group for group in self.groups if isinstance(group.grads, (OwnGrad, HostGrads))]
        return [self.full_param_of(p) for group in found for p in group.params]

    def buffered(self) -> list[FlatGrads]:
        """The buffers that gradients are in."""
        held = [group.grads for group in self.groups]
        return [grads for grads in held if isinstance(grads, FlatGrads) and not isinstance(grads, HostGrads)]

    def drop_parts(self) -> None:
        """Drop the gradients of the parts of sharded parameters, which have been cleared."""
        for grads in self.shards:
            if isinstance(grads, ShardGrads):
                grads.drop()

    def is_any_sharded(self) -> bool:
        """Return True if one of the parameters is a DTensor."""
        return any(map(is_sharded, self.full_params.values()))

    def follow(
        self,
        lists: Sequence[list[Tensor]],
        state_names: list[tuple[str, ...]],
        report: Callable[[int, list[Tensor]], None],
    ) -> bool:
        """Update the groups for the current ``lists``. After an error the attributes are unchanged.

        Args:
            lists: The parameter lists of ``param_groups``.
            state_names: The names of the states of each list.
            report: Called before anything changes, for each entry of ``param_groups`` with parameters that have left
                their slots: with its index and these parameters.

        Returns:
            True if buffers have been replaced, or their states have changed, so that state must be copied.

        Raises:
            TypeError: A parameter that is trainable, or has a gradient, has a dtype that cannot be fused.
            ValueError: The memory of a parameter has gaps.
        """
        params = list(chain.from_iterable(lists))
        known = {id(p) for group in self.groups for p in group.params}
        moved = [group.broken() for group in self.groups]
        self._report(moved, report)
        copies = self._host_copies(params)
        parts = [copies.get(id(p), p) for p in params] if copies else list(map(local_part, params))
        full_params = {id(part): p for part, p in zip(parts, params, strict=True) if part is not p}
        place_of = _places_in(lists, parts)
        # A script may replace a parameter in every step (partial FC), so new parameters get separate groups.
        kind_of = {
            part: (state_names[index], _kind(full_params.get(part)), part in known)
            for part, (index, _) in place_of.items()
        }
        groups = self._still_fit(moved, kind_of)
        unfused = _without_members(parts, groups)
        ready = _ready(unfused, full_params)
        if not all(can_be_stepped(p) and is_dense(p.size(), p.stride()) for p in ready):
            check_params(params)  # raises an error that names the parameter

        self._moving = {id(p) for p in ready}
        left = {id(p) for p in ready if is_sharded(full_params.get(id(p))) and not finds_parts()}
        in_place, movable = ([p for p in ready if (id(p) in left) is held] for held in (True, False))
        groups += [step_in_place(p, capturable=self.capturable) for p in in_place]
        aliases = memory_of_parts(params)
        groups += fuse(movable, kind_of=kind_of, capturable=self.capturable, aliases=aliases)
        unfused = _without_members(unfused, groups)
        # Parameters that share memory are stepped in the order of the list, as in torch.
        groups.sort(key=lambda group: min(place_of[id(p)] for p in group.params))
        same = are_same(groups, self.groups) and are_same(parts, self._params) and self.are_listed(lists)
        same = same and state_names == self.state_names
        listed = list(map(list, lists))
        shards = _part_grads(groups, full_params, in_chunks=self._in_chunks)
        if not same:
            wait_for_moved_parts(chain.from_iterable(grads.params for grads in shards))
        for group in groups:
            _number(group, place_of)
        self.groups, self.unfused, self.full_params = groups, unfused, full_params
        self.shards, self._copies = shards, copies
        self.hosted = [grads for grads in shards if isinstance(grads, HostGrads)]
        self.listed, self._params, self.state_names, self._moving = listed, parts, state_names, set()
        return not same

    def _host_copies(self, params: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the host copies of ``params``, of those on an accelerator that take part in a step."""
        chosen = [p for p in params if p.device.type != "cpu" and takes_part(p)] if self._on_host else []
        return {id(p): host_copy_of(p, self._copies.get(id(p))) for p in chosen}

    def are_listed(self, lists: Sequence[list[Tensor]]) -> bool:
        """Return True if ``lists``, those of ``param_groups``, are the lists that were fused."""
        return len(lists) == len(self.listed) and all(map(are_same, lists, self.listed))

    def _report(self, moved: list[list[int]], report: Callable[[int, list[Tensor]], None]) -> None:
        left: dict[int, list[Tensor]] = {}
        for group, found in zip(self.groups, moved, strict=True):
            for i in found:
                left.setdefault(group.places[i][0], []).append(group.params[i])
        for index, params in left.items():
            if any(id(p) not in self._moving for p in params):
                report(index, params)

    def combinable_params(self) -> list[Tensor]:
        """Return the fused parameters, in the order of the lists.

        Raises:
            RuntimeError: One of them is in another optimizer's buffer, which would move it back.
        """
        held = {id(p): group.has_buffer for group in self.groups for p in group.params}
        fused = [p for p in self._params if id(p) in held]
        for p in fused:
            if not held[id(p)] and is_slot(p):
                raise not_combinable(p)
        return fused

    def release(self) -> None:
        """Drop all groups. The next step fuses parameters that no other group has taken."""
        self.unfused = [*self.unfused, *(p for group in self.groups for p in group.params)]
        self.groups = []

    def adopt(self, groups: list[FusedGroup]) -> None:
        """Use ``groups``, which combine all released parameters."""
        place_of = _places_in(self.listed, self._params)
        for group in groups:
            _number(group, place_of)
        self._combined = True
        self.groups, self.unfused = groups, _without_members(self.unfused, groups)

    def is_rarely_outdated(self) -> bool:
        """Return True if a sharded parameter has another local part now, or if a frozen parameter takes part now.

        Called only if there are such parameters.
        """
        return not all(grads.have_parts() for grads in self.shards) or bool(_ready(self.unfused, self.full_params))

    def _still_fit(self, moved: list[list[int]], kind_of: Mapping[int, object]) -> list[FusedGroup]:
        """Return the groups whose parameters are listed, have one kind (unless combined), and have not ``moved``.

        A parameter that another optimizer has moved is stepped in place: otherwise both would move it in each step.
        """
        groups: list[FusedGroup] = []
        for group, found in zip(self.groups, moved, strict=True):
            kinds = {kind_of.get(id(p)) for p in group.params}
            if not found and None not in kinds and (len(kinds) == 1 or self._combined):
                groups.append(group)
                continue
            # Parameters that a failed call has moved are in no group.
            others = [p for p in map(group.params.__getitem__, found) if id(p) not in self._moving]
            taken = [p for p in others if is_slot(p) and id(p) in kind_of]
            groups.extend(step_in_place(p, capturable=self.capturable) for p in taken)
        return groups


def _kind(full_param: Tensor | None) -> object:
    """Return what parts need to have in common to be in one buffer: their cut, or their accelerator."""
    is_copied = full_param is not None and not is_sharded(full_param)
    return full_param.device if is_copied else cut_of(full_param)  # type: ignore[union-attr]


def _places_in(lists: Sequence[list[Tensor]], parts: list[Tensor]) -> dict[int, tuple[int, int]]:
    """Return ``id(part)`` → the index of its list, and its index in that list."""
    places = [(index, place) for index, params in enumerate(lists) for place in range(len(params))]
    return dict(zip(map(id, parts), places, strict=True))


def _part_grads(groups: list[FusedGroup], full_params: dict[int, Tensor], *, in_chunks: bool) -> list[PartGrads]:
    """Return the gradients of ``groups`` of parts or host copies, and make those that do not exist yet."""
    found: list[PartGrads] = []
    for group in groups:
        full = [full_params[id(p)] for p in group.params if id(p) in full_params]
        if not full:
            continue
        grads = group.grads
        if not isinstance(grads, (ShardGrads, HostGrads, OwnGrad)) or not are_same(grads.full_params, full):
            if not isinstance(grads, FlatGrads) or (is_sharded(full[0]) and not finds_parts()):
                grads = OwnGrad(group.params[0], full[0])
            elif is_sharded(full[0]):
                grads = ShardGrads(grads, full)
            else:
                grads = HostGrads(grads, full)
                group.owners, group.chunk_of = full, grads.chunk_of if in_chunks else []
                group.runs.forget()
            group.grads = grads
        found.append(grads)
    return found


def _number(group: FusedGroup, place_of: dict[int, tuple[int, int]]) -> None:
    """Set ``places`` of ``group`` to the places of its parameters in the lists."""
    places = [place_of[id(p)] for p in group.params]
    if places != group.places:
        group.places = places
        group.runs.forget()
    if isinstance(group.grads, OwnGrad):
        group.grads.index = places[0][1]


def _without_members(params: list[Tensor], groups: list[FusedGroup]) -> list[Tensor]:
    """Return the parameters of ``params`` that are in none of ``groups``."""
    held = {id(p) for group in groups for p in group.params}
    return [p for p in params if id(p) not in held]


def _ready(unfused: list[Tensor], full_params: dict[int, Tensor]) -> list[Tensor]:
    """Return the parameters of ``unfused`` that take part in a step now."""
    return [p for p in unfused if takes_part(full_params.get(id(p), p))]
