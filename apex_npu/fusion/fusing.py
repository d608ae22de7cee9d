# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which parameters can be fused, and how they get into their groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.fusion.flat_buffer import FlatBuffer, leave_private_formats, may_move, plan
from apex_npu.fusion.fused_group import FusedGroup
from apex_npu.fusion.layout import extent_numel, is_dense, overlapping
from apex_npu.fusion.storage import follows_aliases


def step_in_place(param: Tensor, *, capturable: bool = False) -> FusedGroup:
    """A group of one parameter that stays where it lies, because its memory belongs to someone else."""
    flat = param.detach().as_strided((param.numel(),), (1,), param.storage_offset())
    return FusedGroup([param], flat, [0], [param.numel()], capturable=capturable)


def fuse(params: Sequence[Tensor], *, capturable: bool = False) -> list[FusedGroup]:
    """Fuse ``params`` into as few groups as possible: one per device and dtype.

    A parameter that is a view of another owner's buffer, or overlaps another one (tied through ``.data``), does not
    move: it gets a group of its own, over the memory it lies in.

    What has a private format of an NPU leaves it, see ``leave_private_formats``.

    Args:
        params: What to fuse.
        capturable: Steps are counted on the device, unless that is the CPU, so that a captured graph counts them.

    Raises:
        ValueError: A parameter has gaps or overlaps itself; nothing has moved.
        torch.OutOfMemoryError: A buffer does not fit; nothing has moved.
    """
    for i, p in enumerate(params):
        if not is_dense(p.size(), p.stride()):
            raise ValueError(
                f"parameter {i} of size {tuple(p.size())} and stride {p.stride()} does not fill its memory without gap "
                "or overlap, so it cannot be fused; make it dense first: p.data = p.data.contiguous()"
            )
    leave_private_formats(params)
    movable, in_place = _sort_out(params)
    plans = [(members, plan(members)) for members in movable]
    buffers = [FlatBuffer(p.layout.total_numel, p.dtype, p.device) for _, p in plans]
    groups = []
    for (members, planned), buffer in zip(plans, buffers, strict=True):
        buffer.adopt(members, planned.layout)
        order = sorted(range(len(members)), key=planned.offsets.__getitem__)
        offsets = [planned.offsets[i] for i in order]
        ends = [*offsets[1:], planned.layout.total_numel]
        ordered = [members[i] for i in order]
        groups.append(FusedGroup(ordered, buffer.flat, offsets, ends, capturable=capturable))
    return groups + [step_in_place(p, capturable=capturable) for p in in_place]


def _sort_out(params: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Movable parameters by device and dtype, and those to be left in place."""
    by_storage: dict[int, list[Tensor]] = {}
    for p in params:
        by_storage.setdefault(p.untyped_storage()._cdata, []).append(p)
    movable: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    in_place: list[Tensor] = []
    for sharing in by_storage.values():
        distinct, overlapping = _split_overlapping(sharing)
        if not may_move(sharing) or (overlapping and not follows_aliases()):
            in_place.extend(sharing)
            continue
        in_place.extend(overlapping)
        for p in distinct:
            movable.setdefault((p.device, p.dtype), []).append(p)
    return list(movable.values()), in_place


def _split_overlapping(sharing: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of one storage that do not overlap each other, and those that overlap one of these."""
    begins = [int(p.storage_offset()) for p in sharing]
    spans = [(begin, begin + extent_numel(p.size(), p.stride())) for begin, p in zip(begins, sharing, strict=True)]
    left_out = set(overlapping(spans))
    distinct = [p for i, p in enumerate(sharing) if i not in left_out]
    return distinct, [p for i, p in enumerate(sharing) if i in left_out]
