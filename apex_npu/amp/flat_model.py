# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``FlatModel``: the memory of a model's low-precision parameters, laid out like that of their masters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TypeAlias

import torch
from torch import Tensor

from apex_npu.backends import number_on
from apex_npu.fusion import FusedGroup, ModelParamBuffer, are_same
from apex_npu.fusion.layout import ALIGN_NUMEL

# A group of masters, and the buffer of their model parameters.
GroupBuffer: TypeAlias = tuple[FusedGroup, ModelParamBuffer]


@dataclass(eq=False)
class FlatModel:
    """A model's low-precision parameters, in buffers laid out like those that a fused optimizer has for their masters.

    Attributes:
        groups: The optimizer's groups that it was made for.
        masters: And the masters.
        buffers: For each group whose masters have such a buffer, the group and the buffer.
        unfused: ``id(master)`` → a model parameter that cannot move, because its memory is shared with something else.
        loose: The masters and model parameters that are rounded one by one: these, and those of buffers that are
            not watched.
        unwatched: Of the buffers those on accelerators, each with the lines that are the model's, see ``_lines_of``.
    """

    groups: list[FusedGroup]
    masters: list[Tensor]
    buffers: list[GroupBuffer]
    unfused: dict[int, Tensor]
    loose: tuple[list[Tensor], list[Tensor]]
    unwatched: list[tuple[FusedGroup, ModelParamBuffer, Tensor | None]]

    @classmethod
    def of(
        cls,
        groups: Sequence[FusedGroup],
        masters: Sequence[Tensor],
        model_params: Sequence[Tensor],
        kept: Sequence[GroupBuffer] = (),
    ) -> FlatModel:
        """Move ``model_params`` into buffers, values included; those of ``kept`` are there already."""
        model_param_of = dict(zip(map(id, masters), model_params, strict=True))
        known = {id(group): buffer for group, buffer in kept}
        buffers: list[GroupBuffer] = []
        for group in groups:
            buffer = known.get(id(group))
            if buffer is None:
                params = [model_param_of.get(id(p)) for p in group.params]
                buffer = group.add_model_params(params)
            if buffer is not None:
                buffers.append((group, buffer))
        moved = {id(p) for _, buffer in buffers for p in buffer.params}
        unfused = {master: param for master, param in model_param_of.items() if id(param) not in moved}
        at_once = {id(p) for _, buffer in buffers if _is_copied_at_once(buffer) for p in buffer.params}
        loose = [id(param) not in at_once for param in model_params]
        columns = list(compress(masters, loose)), list(compress(model_params, loose))
        unwatched = []
        for group, buffer in buffers:
            if buffer.flat.device.type == "cpu":
                continue
            left_out = [id(model_param_of.get(id(p))) not in moved for p in group.params]
            unwatched.append((group, buffer, _lines_of(group, left_out, buffer.flat.dtype)))
        return cls(list(groups), list(masters), buffers, unfused, columns, unwatched)

    def fits(self, groups: Sequence[FusedGroup], masters: Sequence[Tensor]) -> bool:
        """False once groups or masters are others, or a model parameter has been moved."""
        if not are_same(groups, self.groups) or not are_same(masters, self.masters):
            return False
        return not any(buffer.table.broken(buffer.params) for _, buffer in self.buffers)

    def dissolve(self, groups: Sequence[FusedGroup]) -> list[GroupBuffer]:
        """Give up the buffers that do not fit ``groups``, and return those that stay."""
        held = {id(group): buffer for group, buffer in self.buffers if not buffer.table.broken(buffer.params)}
        return [(group, held[id(group)]) for group in groups if id(group) in held]

    def places(self) -> dict[int, Tensor]:
        """``id(master)`` → where the model parameter was in a buffer, for the buffers that some have left."""
        return {
            id(master): buffer.flat[offset : offset + master.numel()]
            for group, buffer in self.buffers
            if buffer.table.broken(buffer.params)
            for master, offset in group.placed(range(len(group.params)))
        }

    def missing(self) -> list[Tensor]:
        """The model parameters that are in no buffer, of masters that are stepped."""
        return [self.unfused[id(p)] for group in self.groups for p in group.params if id(p) in self.unfused]


def _is_copied_at_once(buffer: ModelParamBuffer) -> bool:
    return buffer.watched or buffer.flat.device.type != "cpu"


def _lines_of(group: FusedGroup, left_out: Sequence[bool], dtype: torch.dtype) -> Tensor | None:
    """0 for each line of the buffer of ``group`` that is of a parameter that is ``left_out``, and 1; None: none is."""
    if not any(left_out):
        return None
    placed = group.placed(range(len(group.params)))
    # In memory that has stayed a script's, parameters begin anywhere: there each element is a line.
    width = 1 if any(offset % ALIGN_NUMEL for _, offset in placed) else ALIGN_NUMEL
    lines = torch.ones(group.param_flat.numel() // width, 1, dtype=dtype, device="cpu")
    for (param, offset), is_out in zip(placed, left_out, strict=True):
        if is_out:
            lines[offset // width : -(-(offset + param.numel()) // width)] = 0
    return number_on(lines, group.param_flat.device)
