# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``FusedGroup``: the buffers of an optimizer's parameters of one device and dtype, and their runs.

``fuse`` finds the parameters that can be fused, ``fuse_combined`` those that can be combined; both move them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from apex_npu.fusion.flat_buffer import (
    FlatBuffer,
    Plan,
    extent_numel,
    is_dense,
    leave_private_formats,
    may_move,
    overlapping,
    plan,
    with_aliases,
)
from apex_npu.fusion.flat_grads import FlatGrads, check_combinable
from apex_npu.fusion.graph_runs import GraphRuns
from apex_npu.fusion.group_buffers import GroupBuffers
from apex_npu.fusion.run import Runs, StepCounts


class HasFusedGroups:
    """The base class of fused optimizers. amp recognizes fused optimizers by it.

    Attributes:
        state_formats: The formats of the states, see ``StateFormats`` of the optimizers.
    """

    state_formats: Any

    def flat_grads(self) -> list[FlatGrads]:
        """Return the gradient buffers of all parameters. Fuses parameters that are not fused yet."""
        raise NotImplementedError

    def fused_groups(self) -> list[FusedGroup]:
        """Return the groups of the last step."""
        raise NotImplementedError

    def combined_groups(self) -> list[FusedGroup]:
        """Return one group for each combined buffer. Makes the buffers if they do not exist."""
        raise NotImplementedError

    def combined_grads(self) -> list[FlatGrads]:
        """Return the gradients of each of ``combined_groups``."""
        return [fused.grads for fused in self.combined_groups() if isinstance(fused.grads, FlatGrads)]

    def leading_params(self) -> Sequence[Tensor]:
        """Return the parameters whose combined buffers come before all others: amp's 16-bit ones."""
        return ()

    def check_combining(self) -> None:
        """Require that combined buffers may be made now.

        Raises:
            RuntimeError: Combined buffers may not be made; nothing has moved.
        """
        check_combinable()

    def moving_params(self) -> AbstractContextManager[None]:
        """Return the context for code that moves parameters to other addresses outside of a step."""
        return nullcontext()


class FusedGroup(GroupBuffers):
    """The buffers of some parameters, and their runs.

    Attributes:
        runs: The runs: which slots step together.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        param_flat: Tensor,
        offsets: Sequence[int],
        runs: Runs,
    ) -> None:
        """Wrap ``param_flat``, into which ``fuse`` has moved ``params``, as ``GroupBuffers`` does. Store ``runs``."""
        super().__init__(params, param_flat, offsets)
        self.runs = runs
        if isinstance(self.grads, FlatGrads) and isinstance(runs, GraphRuns):
            # A graph replays the addresses of its capture, so gradients must stay at their addresses.
            self.grads.gathers_all, self.grads.memory.lends = True, False

    def set_step(self, index: int, step: float) -> None:
        """Set the step count of one parameter."""
        self.runs.counts.set(index, step)
        self.runs.forget()
        if step != 0:
            self.use(index)


def new_runs(count: int, device: torch.device, *, capturable: bool) -> Runs:
    """Return the runs of a new group of ``count`` slots. Allocates the memory of the step counts."""
    on_device = capturable and device.type != "cpu"
    return GraphRuns(count, device) if on_device else Runs(StepCounts(count))


def step_in_place(param: Tensor, *, capturable: bool = False) -> FusedGroup:
    """Return a group of one parameter that is not moved, because its memory has another owner."""
    flat = param.detach().as_strided((param.numel(),), (1,), param.storage_offset())
    group = FusedGroup([param], flat, [0], new_runs(1, param.device, capturable=capturable))
    group.has_buffer = False
    return group


def fuse(
    params: Sequence[Tensor],
    *,
    kind_of: Mapping[int, Hashable] = MappingProxyType({}),
    capturable: bool = False,
    aliases: Mapping[int, Sequence[Tensor]] = MappingProxyType({}),
) -> list[FusedGroup]:
    """Fuse ``params`` into as few groups as possible: one per device, dtype and kind.

    A parameter that is a view of another owner's buffer, or overlaps another parameter (tied through ``.data``), does
    not move. It gets a separate group over its present memory. Parameters in a private format of an NPU leave it, see
    ``leave_private_formats``.

    Args:
        params: The parameters to fuse.
        kind_of: ``id(param)`` → a kind.
        capturable: Count steps on the device, unless it is the CPU, so that a captured graph counts them.
        aliases: ``id(param)`` → other tensors over its storage, which move with it and may be larger than it.

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
    movable, in_place = _sort_out(params, kind_of, aliases)
    plans, buffers, runs = _prepare(movable, capturable=capturable)
    stepped_in_place = [step_in_place(p, capturable=capturable) for p in in_place]
    return [*map(partial(_move, aliases=aliases), movable, plans, buffers, runs), *stepped_in_place]


def _prepare(lists: Sequence[Sequence[Tensor]], *, capturable: bool) -> tuple[list[Plan], list[FlatBuffer], list[Runs]]:
    """Allocate all memory for each of ``lists``, so that the move that follows cannot fail."""
    plans = [plan(members) for members in lists]
    buffers = [FlatBuffer(p.layout.total_numel, p.dtype, p.device) for p in plans]
    return plans, buffers, [new_runs(len(p.offsets), p.device, capturable=capturable) for p in plans]


def _move(
    members: Sequence[Tensor],
    planned: Plan,
    buffer: FlatBuffer,
    runs: Runs,
    aliases: Mapping[int, Sequence[Tensor]] = MappingProxyType({}),
) -> FusedGroup:
    buffer.adopt(members, planned.layout, aliases=aliases)
    order = sorted(range(len(members)), key=planned.offsets.__getitem__)
    ordered, offsets = [members[i] for i in order], [planned.offsets[i] for i in order]
    return FusedGroup(ordered, buffer.flat, offsets, runs)


def by_kind(params: Iterable[Tensor], leading: Collection[int]) -> list[list[Tensor]]:
    """Return the parameters of each combined buffer: one buffer per device and dtype, those of ``leading`` first.

    Args:
        params: The parameters of all buffers, in order.
        leading: ``id(param)`` of the parameters that have buffers of their own.
    """
    found: dict[tuple[bool, torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        found.setdefault((id(p) not in leading, p.device, p.dtype), []).append(p)
    return [found[kind] for kind in sorted(found, key=itemgetter(0))]


def combined(held: Sequence[Any], leading: Collection[int]) -> list[Any] | None:
    """Return ``held``, which have ``params``, in the order of ``by_kind``; None unless each has all of one kind."""
    holder = {id(p): group for group in held for p in group.params}
    kinds = by_kind((p for group in held for p in group.params), leading)
    if len(kinds) != len(held) or any(len({id(holder[id(p)]) for p in kind}) > 1 for kind in kinds):
        return None
    return [holder[id(kind[0])] for kind in kinds]


def fuse_combined(
    kinds: Sequence[Sequence[Tensor]], before_moving: Callable[[], None], *, capturable: bool = False
) -> list[FusedGroup]:
    """Move fused parameters into combined buffers.

    Args:
        kinds: For each buffer its parameters, of one device and dtype.
        before_moving: Called when nothing can fail any more, to drop the groups that contain the parameters.
        capturable: The argument of ``fuse``.

    Raises:
        RuntimeError: A parameter cannot be moved; nothing has moved.
        torch.OutOfMemoryError: A buffer does not fit; nothing has moved.
    """
    _check_may_move(kinds)
    plans, buffers, runs = _prepare(kinds, capturable=capturable)
    before_moving()
    return list(map(_move, kinds, plans, buffers, runs))


def _check_may_move(lists: Sequence[Sequence[Tensor]]) -> None:
    by_storage: dict[int, list[Tensor]] = {}
    lists_of: dict[int, set[int]] = {}
    for number, members in enumerate(lists):
        for p in members:
            storage = p.untyped_storage()._cdata
            by_storage.setdefault(storage, []).append(p)
            lists_of.setdefault(storage, set()).add(number)
    for storage, sharing in by_storage.items():
        if len(lists_of[storage]) > 1 or not may_move(sharing) or _split_overlapping(sharing)[1]:
            raise not_combinable(sharing[0])


def not_combinable(param: Tensor) -> RuntimeError:
    """Return an error that says that ``param`` cannot be part of a combined buffer."""
    return RuntimeError(
        f"a parameter of shape {tuple(param.shape)} cannot be moved into a combined buffer, since it shares its memory "
        "with other tensors (views of it, also in a graph before its backward; another optimizer's buffer; a larger "
        "tensor that it is a part of). Call the accessor after backward, and give the parameter separate memory "
        "(p.data = p.data.clone()); or use clip_optimizer_grad_norm_fused and the parameters themselves, which need no "
        "combined buffer. Nothing has moved"
    )


def _sort_out(
    params: Sequence[Tensor],
    kind_of: Mapping[int, Hashable],
    aliases: Mapping[int, Sequence[Tensor]],
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the movable parameters by device, dtype and kind, and those to leave in place."""
    by_storage: dict[int, list[Tensor]] = {}
    for p in params:
        by_storage.setdefault(p.untyped_storage()._cdata, []).append(p)
    movable: dict[Hashable, list[Tensor]] = {}
    in_place: list[Tensor] = []
    for sharing in by_storage.values():
        distinct, overlapping = _split_overlapping(sharing)
        kinds = {kind_of.get(id(p)) for p in sharing}
        if not may_move(with_aliases(sharing, aliases)) or len(kinds) > 1:
            in_place.extend(sharing)
            continue
        in_place.extend(overlapping)
        for p in distinct:
            movable.setdefault((*kinds, p.device, p.dtype), []).append(p)
    return list(movable.values()), in_place


def _split_overlapping(sharing: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return tensors of one storage that do not overlap each other, and those that overlap one of these."""
    if len(sharing) == 1:
        return sharing, []
    begins = [int(p.storage_offset()) for p in sharing]
    spans = [(begin, begin + extent_numel(p.size(), p.stride())) for begin, p in zip(begins, sharing, strict=True)]
    left_out = set(overlapping(spans))
    distinct = [p for i, p in enumerate(sharing) if i not in left_out]
    return distinct, [p for i, p in enumerate(sharing) if i in left_out]
