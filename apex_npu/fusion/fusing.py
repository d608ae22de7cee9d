# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which parameters can be fused, and how they get into their groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from apex_npu.fusion.combined import SharedBuffer
from apex_npu.fusion.flat_buffer import FlatBuffer, Plan, leave_private_formats, may_move, plan
from apex_npu.fusion.fused_group import FusedGroup, flat_over, new_runs
from apex_npu.fusion.layout import extent_numel, is_dense, overlapping
from apex_npu.fusion.run import Runs
from apex_npu.fusion.storage import follows_aliases, is_part_of_storage


def step_in_place(param: Tensor, *, capturable: bool = False) -> FusedGroup:
    """A group of one parameter that is not moved, because its memory has another owner."""
    group = FusedGroup([param], flat_over(param), [0], new_runs(1, param.device, capturable=capturable))
    group.owns_memory = False
    return group


def fuse(params: Sequence[Tensor], apart: Sequence[Tensor] = (), *, capturable: bool = False) -> list[FusedGroup]:
    """Fuse ``params`` into as few groups as possible: one per device and dtype. Likewise ``apart``, in other groups.

    A parameter that is a view of another owner's buffer, or overlaps another one (tied through ``.data``), does not
    move: it gets a group of its own, over its present memory.

    What has a private format of an NPU leaves it, see ``leave_private_formats``.

    Args:
        params: What to fuse.
        apart: What to fuse apart from these, unless they share memory.
        capturable: Steps are counted on the device, unless that is the CPU, so that a captured graph counts them.

    Raises:
        ValueError: A parameter has gaps or overlaps itself; nothing has moved.
        torch.OutOfMemoryError: A buffer does not fit; nothing has moved.
    """
    everything = [*params, *apart]
    for i, p in enumerate(everything):
        if not is_dense(p.size(), p.stride()):
            raise ValueError(
                f"parameter {i} of size {tuple(p.size())} and stride {p.stride()} does not fill its memory without gap "
                "or overlap, so it cannot be fused; make it dense first: p.data = p.data.contiguous()"
            )
    leave_private_formats(everything)
    movable, in_place = _sort_out(everything, {id(p) for p in apart})
    plans = [plan(members) for members in movable]
    buffers = [FlatBuffer(p.layout.total_numel, p.dtype, p.device) for p in plans]
    runs = [_runs(p, capturable=capturable) for p in plans]
    stepped_in_place = [step_in_place(p, capturable=capturable) for p in in_place]
    return [*map(_move, movable, plans, buffers, runs), *stepped_in_place]


def _runs(planned: Plan, *, capturable: bool) -> Runs:
    return new_runs(len(planned.offsets), planned.device, capturable=capturable)


def _move(
    members: Sequence[Tensor],
    planned: Plan,
    buffer: FlatBuffer,
    runs: Runs,
    grad_memory: Callable[[], FlatBuffer] | None = None,
) -> FusedGroup:
    buffer.adopt(members, planned.layout)
    order = sorted(range(len(members)), key=planned.offsets.__getitem__)
    ordered, offsets = [members[i] for i in order], [planned.offsets[i] for i in order]
    return FusedGroup(ordered, buffer.flat, offsets, runs, grad_memory)


def fuse_combined(
    kinds: Sequence[Sequence[Sequence[Tensor]]], before_moving: Callable[[], None], *, capturable: bool = False
) -> list[list[FusedGroup]]:
    """Move parameters that have been fused into combined buffers.

    Args:
        kinds: For each buffer lists of parameters, of one device and dtype; each list gets a group, over a range of the
            buffer. The buffer of their gradients has the same ranges.
        before_moving: Called when nothing can be refused any more, to give up the groups that they are in.
        capturable: As of ``fuse``.

    Raises:
        RuntimeError: A parameter cannot be moved; nothing has moved.
        torch.OutOfMemoryError: A buffer does not fit; nothing has moved.
    """
    _check_may_move([members for lists in kinds for members in lists])
    planned = [[plan(members) for members in lists] for lists in kinds]
    buffers = [
        FlatBuffer(sum(p.layout.total_numel for p in plans), plans[0].dtype, plans[0].device) for plans in planned
    ]
    runs = [[_runs(p, capturable=capturable) for p in plans] for plans in planned]
    before_moving()
    return list(map(_move_into, buffers, kinds, planned, runs))


def _move_into(
    buffer: FlatBuffer, lists: Sequence[Sequence[Tensor]], plans: Sequence[Plan], runs: Sequence[Runs]
) -> list[FusedGroup]:
    grads = SharedBuffer(buffer.flat.numel(), buffer.flat.dtype, buffer.flat.device)
    groups: list[FusedGroup] = []
    begin = 0
    for members, planned, runs_of_them in zip(lists, plans, runs, strict=True):
        numel = planned.layout.total_numel
        memory = partial(grads.part, begin, numel)
        groups.append(_move(members, planned, buffer.part(begin, numel), runs_of_them, memory))
        begin += numel
    return groups


def _check_may_move(lists: Sequence[Sequence[Tensor]]) -> None:
    by_storage: dict[int, list[Tensor]] = {}
    lists_of: dict[int, set[int]] = {}
    for number, members in enumerate(lists):
        for p in members:
            storage = p.untyped_storage()._cdata
            by_storage.setdefault(storage, []).append(p)
            lists_of.setdefault(storage, set()).add(number)
    for storage, sharing in by_storage.items():
        if is_part_of_storage(sharing[0]):
            continue
        if len(lists_of[storage]) > 1 or not may_move(sharing) or _split_overlapping(sharing)[1]:
            raise not_combinable(sharing[0])


def not_combinable(param: Tensor) -> RuntimeError:
    """An error that says that ``param`` cannot be part of a combined buffer."""
    return RuntimeError(
        f"a parameter of shape {tuple(param.shape)} cannot be moved into a combined buffer, since other tensors are in "
        "the same memory (views of it, also in a graph before its backward; another optimizer's buffer; a larger "
        "tensor that it is a part of). Call the accessor after backward, and give the parameter memory of its own "
        "(p.data = p.data.clone()); or use clip_optimizer_grad_norm_fused and the parameters themselves, which need no "
        "combined buffer. Nothing has moved"
    )


def give_own_storages(params: Sequence[Tensor]) -> None:
    """Move slots that have no storage of their own out of their buffer, of which no group is left."""
    for p in filter(is_part_of_storage, params):
        p.data = p.detach().clone()


def _sort_out(params: Sequence[Tensor], apart: Collection[int]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Movable parameters by device and dtype, those with an id in ``apart`` apart; and those to be left in place."""
    by_storage: dict[int, list[Tensor]] = {}
    for p in params:
        by_storage.setdefault(p.untyped_storage()._cdata, []).append(p)
    movable: dict[tuple[bool, torch.device, torch.dtype], list[Tensor]] = {}
    in_place: list[Tensor] = []
    for sharing in by_storage.values():
        distinct, overlapping = _split_overlapping(sharing)
        if not may_move(sharing) or (overlapping and not follows_aliases()):
            in_place.extend(sharing)
            continue
        in_place.extend(overlapping)
        for p in distinct:
            movable.setdefault((id(sharing[0]) in apart, p.device, p.dtype), []).append(p)
    return list(movable.values()), in_place


def _split_overlapping(sharing: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of one storage that do not overlap each other, and those that overlap one of these."""
    begins = [int(p.storage_offset()) for p in sharing]
    spans = [(begin, begin + extent_numel(p.size(), p.stride())) for begin, p in zip(begins, sharing, strict=True)]
    left_out = set(overlapping(spans))
    distinct = [p for i, p in enumerate(sharing) if i not in left_out]
    return distinct, [p for i, p in enumerate(sharing) if i in left_out]
