# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``OptimizerGrads``: which gradients of an optimizer are unscaled together, and the buffers of one that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.grad_groups import FlatGradGroup, GradGroup
from apex_npu.amp.master_grads import FlatMasterGradGroup, MasterGradGroup
from apex_npu.amp.master_params import MasterParams
from apex_npu.amp.saturation import saturates
from apex_npu.fusion import FlatGrads, HasFusedGroups, are_same, by_kind, combined
from apex_npu.fusion.shards import meshes_of

_PARAMS = itemgetter("params")


class OptimizerGrads:
    """How the gradients of one optimizer get to its parameters.

    Attributes:
        groups: Made again when its parameters, or their buffers, have changed.
        saturates: They are on a device that saturates instead of giving inf.
        meshes: The device meshes over which parameters are sharded.
        special: Either: a block needs more than the ordinary one.
        saturated: There: some have overflowed, and they have not been cleared.
        unchecked: Some have been brought to the optimizer's parameters without a check for inf or NaN.
    """

    def __init__(self) -> None:
        self.groups: list[GradGroup] = []
        self.saturates = self.saturated = self.special = False
        self.meshes: list[Any] = []
        self.unchecked = False
        self._device: torch.device | None = None
        self._fitted_to: list[list[Any]] = []
        self._own_flats: list[FlatGrads] = []

    def fit(self, optimizer: Optimizer, masters: MasterParams, *, combine_grad: bool) -> list[GradGroup]:
        """The groups for ``optimizer`` as it is now, whose parameters ``masters`` has some of.

        With ``combine_grad`` one that has no flat buffers gets some.
        """
        if isinstance(optimizer, HasFusedGroups):
            flats = optimizer.flat_grads()
        else:
            flats = self._combined(optimizer) if combine_grad else []
        fitted_to: list[list[Any]] = [flats, *map(_PARAMS, optimizer.param_groups)]
        fits = len(fitted_to) == len(self._fitted_to) and all(map(are_same, fitted_to, self._fitted_to))
        if not fits or (self.groups and self.groups[0].device != self._device):
            self._make(optimizer, masters, flats)
            self._fitted_to = [list(part) for part in fitted_to]
        return self.groups

    def _make(self, optimizer: Optimizer, masters: MasterParams, flats: list[FlatGrads]) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        model_param_of = {id(pair.master_param): pair.model_param for pair in masters.pairs}
        groups = make_grad_groups(params, flats, model_param_of)
        for group in groups:
            if isinstance(group, MasterGradGroup):
                group.adopt_from(self.groups)
        self.saturates, self.meshes = saturates(groups), meshes_of(params)
        self.special = self.saturates or bool(self.meshes)
        self._device = groups[0].device if groups else None
        self.groups = groups  # last: what they know of copied gradients is all there

    def _combined(self, optimizer: Optimizer) -> list[FlatGrads]:
        params = trainable(optimizer)
        held = {id(p) for flat in self._own_flats for p in flat.params}
        if held != {id(p) for p in params} or any(flat.broken() for flat in self._own_flats):
            self._own_flats = combine_grads(params, self._own_flats)
        return self._own_flats

    def combined(self, optimizer: Any, masters: MasterParams, *, combine_grad: bool) -> list[FlatGrads]:
        """One for each combined buffer; memory is laid out so now if it was not."""
        if isinstance(optimizer, HasFusedGroups):
            flats = [fused.grads for fused in optimizer.combined_groups()]
        else:
            flats = self._combined_own(optimizer, combine_grad)
        self.fit(optimizer, masters, combine_grad=combine_grad)  # groups take over from those of other buffers
        return flats

    def _combined_own(self, optimizer: Any, combine_grad: bool) -> list[FlatGrads]:
        flats = self._combined(optimizer) if combine_grad else []
        leading = {id(p) for p in optimizer.leading_params()}
        found = combined(flats, leading)
        if found is None:
            optimizer.check_combining()
            found = self._own_flats = list(map(FlatGrads.apart, by_kind(trainable(optimizer), leading)))
        return found

    def forget_copied(self, set_to_none: bool) -> None:
        """The gradients of the model and of the masters have been cleared."""
        for group in self.groups:
            group.forget_copied(set_to_none)

    def materialize(self) -> None:
        """Masters that share the model's gradients, until the step, are about to be read: give them their own."""
        for group in self.groups:
            group.materialize_grads()


def make_grad_groups(
    params: Sequence[Tensor], flats: Sequence[FlatGrads], model_param_of: Mapping[int, Tensor]
) -> list[GradGroup]:
    """The groups of an optimizer.

    Args:
        params: All that it steps.
        flats: The buffers that some of their gradients are in.
        model_param_of: ``id(master)`` → model parameter.
    """

    def sources_of(params: Sequence[Tensor]) -> list[Tensor]:
        return [model_param_of.get(id(p), p) for p in params]

    groups: list[GradGroup] = []
    for flat in flats:
        has_masters = any(id(p) in model_param_of for p in flat.params)
        groups.append(FlatMasterGradGroup(flat, sources_of(flat.params)) if has_masters else FlatGradGroup(flat))
    held = {id(p) for flat in flats for p in flat.params}
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        if id(p) not in held:
            alike.setdefault((p.device, p.dtype), []).append(p)
    for members in alike.values():
        has_masters = any(id(p) in model_param_of for p in members)
        groups.append(MasterGradGroup(members, sources_of(members)) if has_masters else GradGroup(members))
    return groups


def trainable(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that need a gradient, or have one."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad or p.grad is not None]


def combine_grads(params: Sequence[Tensor], former: list[FlatGrads]) -> list[FlatGrads]:
    """One gradient buffer per device and dtype of ``params``, those of an optimizer that has none of its own.

    Those of ``former`` stay that still fit. What replaces a parameter gets a buffer apart from the others, as it may be
    replaced in every step.
    """
    there = set(map(id, params))
    flats = [flat for flat in former if all(id(p) in there for p in flat.params) and not flat.broken()]
    held = {id(p) for flat in flats for p in flat.params}
    known = {id(p) for flat in former for p in flat.params}
    members: dict[tuple[bool, torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        if id(p) not in held:
            members.setdefault((id(p) in known, p.device, p.dtype), []).append(p)
    return [*flats, *map(FlatGrads.apart, members.values())]
