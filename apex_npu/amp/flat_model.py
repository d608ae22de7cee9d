# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bring masters back to the model in one copy for each buffer, rather than one for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apex_npu.amp.master_params import MasterPair, copy_masters_to_model, write_unless
from apex_npu.fusion import FusedGroup, Twin, are_same, increment_versions


@dataclass(eq=False)
class FlatModel:
    """A model's low-precision parameters, in buffers laid out like those that a fused optimizer has for their masters.

    Attributes:
        groups: The optimizer's groups that it was made for.
        pairs: And the pairs.
        twins: For each group whose masters have such a buffer, the group and the buffer.
        loose: Pairs whose model parameter cannot move, because its memory belongs to someone else, too.
    """

    groups: list[FusedGroup]
    pairs: list[MasterPair]
    twins: list[tuple[FusedGroup, Twin]]
    loose: list[MasterPair]

    @classmethod
    def of(cls, groups: Sequence[FusedGroup], pairs: Sequence[MasterPair]) -> FlatModel:
        """Move the model's parameters into buffers, values included."""
        model_param_of = {id(pair.master_param): pair.model_param for pair in pairs}
        twins: list[tuple[FusedGroup, Twin]] = []
        for group in groups:
            params = [model_param_of.get(id(p)) for p in group.params]
            twin = group.twin(params)
            if twin is not None:
                twins.append((group, twin))
        moved = {id(p) for _, twin in twins for p in twin.params}
        return cls(list(groups), list(pairs), twins, [pair for pair in pairs if id(pair.model_param) not in moved])

    def fits(self, groups: Sequence[FusedGroup], pairs: Sequence[MasterPair]) -> bool:
        """False once groups or pairs are others, or somebody has moved a model parameter."""
        same = are_same(groups, self.groups) and are_same(pairs, self.pairs)
        return same and not any(twin.broken() for _, twin in self.twins)

    @property
    def flats(self) -> list[Tensor]:
        """The buffers."""
        return [twin.flat for _, twin in self.twins]

    @torch.no_grad()
    def copy_masters(self, skipped: Tensor | None = None) -> None:
        """Round every master into its model parameter; see ``copy_masters_to_model``."""
        for group, twin in self.twins:
            if not group.has_copied_to(twin):
                write_unless(skipped, twin.flat, group.param_flat)
            increment_versions(twin.params)
        copy_masters_to_model(self.loose, skipped)
