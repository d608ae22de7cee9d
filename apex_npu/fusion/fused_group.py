# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters, gradients and state of one (param_group, device, dtype), flat, and which parts step together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from apex_npu.fusion.flat_buffer import FlatBuffer, owns_storage, plan
from apex_npu.fusion.flat_grads import PRESENT, FlatGrads
from apex_npu.fusion.layout import Layout, Slot, extent_numel, is_dense
from apex_npu.fusion.storage import (
    follows_aliases,
    has_unnamed_aliases,
    owns_memory,
    release_previous,
    slot_table,
    storage_numel,
)
from apex_npu.ops import Segments, wide_dtype
from apex_npu.ops.reference_segments import segment_ids

_T = TypeVar("_T")


class HasFusedGroups(Protocol):
    """What amp needs to know of an optimizer that fuses by itself."""

    def flat_grads(self) -> list[FlatGrads]:
        """The gradient buffers of all parameters, fused now if they were not."""
        ...

    def fused_groups(self) -> list[FusedGroup]:
        """What the last step has stepped."""
        ...


class Run:
    """Consecutive slots that take part in a step and share a step count; usually the whole buffer.

    Attributes:
        params: The parameters themselves.
        param: 1-D, dtype of the parameters; padding between slots included.
        step: How many times these slots have been updated, this time included.
        scaled_grad: The gradients as they lie in their buffer; not to be written.
        grad_scale: What these have yet to be divided by, one float32 number; None: they are as they should be.
    """

    def __init__(self, group: FusedGroup, first: int, last: int, step: int) -> None:
        """The slots ``first`` to ``last`` of ``group``, both included."""
        self._group = group
        self.first, self.last = first, last
        self.params = group.params[first : last + 1]
        self._begin, self._end = group.span(first, last)
        self._is_whole = (first, last) == (0, len(group.params) - 1)
        self.step, self.step_before = step, float(step)
        self.grad_scale: Tensor | None = None
        self.param = group.param_flat[self._begin : self._end]
        self.scaled_grad = group.grads.flat[self._begin : self._end]
        self._slices: dict[tuple[str, str], Tensor] = {}
        self._segments: dict[bool, Segments] = {}
        self._remembered: dict[str, tuple[object, Any]] = {}

    def take_back(self) -> None:
        """Count the step that ``FusedGroup.advance`` has counted no longer: it could not be taken."""
        self._group.set_steps(self.first, self.last, self.step_before)

    def state(self, name: str) -> Tensor:
        """The flat state ``name``: float32 for low-precision parameters, else of their dtype; zeros at first."""
        return self._slice("state", name, self._group.state_flat)

    def scratch(self, name: str) -> Tensor:
        """Flat memory for this step's intermediate values, of the state's dtype; what it holds is arbitrary."""
        return self._slice("scratch", name, self._group.scratch_flat)

    def per_param(self, name: str) -> Tensor:
        """The state ``name`` of one number for each parameter: 1-D, of the state's dtype."""
        return self._group.scalar_flat(name)[self.first : self.last + 1]

    def _slice(self, kind: str, name: str, flat: Callable[[str], Tensor]) -> Tensor:
        found = self._slices.get((kind, name))
        if found is None:
            found = self._slices[kind, name] = flat(name)[self._begin : self._end]
        return found

    def remember(self, name: str, value: object, make: Callable[[], _T]) -> _T:
        """What ``make`` gives, made once for as long as the same slots step together and ``value`` is the same."""
        if name not in self._remembered or self._remembered[name][0] != value:
            self._remembered[name] = (value, make())
        remembered: _T = self._remembered[name][1]
        return remembered

    def wide_param(self) -> Tensor:
        """``param`` in the state's dtype: itself, or a copy that ``write_back`` rounds into it."""
        if self.param.dtype == self._group.state_dtype:
            return self.param
        return self.scratch("param").copy_(self.param)

    @property
    def grad(self) -> Tensor:
        """The gradients, of the dtype of the parameters; a copy where they have to be divided first."""
        return self.scaled_grad if self.grad_scale is None else self.wide_grad().to(self.scaled_grad.dtype)

    def wide_grad(self) -> Tensor:
        """The gradients in the state's dtype, not to be written; a copy where they have another, or have a scale."""
        if self.scaled_grad.dtype == self._group.state_dtype and self.grad_scale is None:
            return self.scaled_grad
        grad = self.scratch("grad").copy_(self.scaled_grad)
        return grad if self.grad_scale is None else grad.div_(self.grad_scale)

    def model_param(self) -> Tensor | None:
        """The low-precision copy of ``param``, for an op that writes both; None: there is none, or not of this run."""
        return self._group.take_copy() if self._is_whole else None

    def write_back(self, param: Tensor) -> None:
        """Round what ``wide_param`` gave, and a rule has changed, into ``param``."""
        if param is not self.param:
            self.param.copy_(param)

    def segments(self, *, rows: bool = False) -> Segments:
        """Where each parameter lies in the flat tensors, or with ``rows`` each of its rows along the first dimension.

        Padding belongs to none.
        """
        found = self._segments.get(rows)
        if found is None:
            found = self._segments[rows] = self._find_segments(rows)
        return found

    def _find_segments(self, rows: bool) -> Segments:
        starts: list[int] = []
        lengths: list[int] = []
        scattered: list[tuple[Tensor, int, int]] = []
        for p, offset in self.members():
            count = row_count(p) if rows else 1
            length = p.numel() // count
            if count > 1 and p.stride(0) != length:
                scattered.append((p, offset, len(starts)))  # a transposed matrix: its rows are no ranges of memory
            starts += [offset + i * length for i in range(count)]
            lengths += [length] * count
        segments = Segments.of(starts, lengths, self.param.numel(), self.param.device)
        if not scattered:
            return segments
        ids = segment_ids(segments.starts, segments.lengths, self.param.numel(), self.param.device)
        for p, offset, first in scattered:
            row = torch.arange(first, first + p.size(0), device=p.device).view(-1, *[1] * (p.dim() - 1))
            ids[offset : offset + p.numel()].as_strided(p.size(), p.stride(), ids.storage_offset() + offset).copy_(row)
        return replace(segments, ids=ids)

    def members(self) -> list[tuple[Tensor, int]]:
        """The run's parameters, each with the elements before its first one in the flat tensors."""
        return [(p, offset - self._begin) for p, offset in self._group.placed(self.first, self.last)]


def row_count(param: Tensor) -> int:
    """How many rows along its first dimension a parameter has; vectors and numbers count as one row."""
    return int(param.size(0)) if param.dim() > 1 and param.numel() else 1


class FusedGroup:
    """The flat buffers of some parameters.

    Attributes:
        params: Of one dtype and device, dense, not overlapping.
        param_flat: 1-D over the memory of all of them.
        grads: Their gradients, laid out alike.
    """

    def __init__(
        self, params: Sequence[Tensor], param_flat: Tensor, offsets: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Over memory that ``params`` already lie in; see ``fuse`` for how they get there."""
        self.params = list(params)
        self.param_flat = param_flat
        self._offsets = list(offsets)
        self._ends = list(ends)
        self._table = slot_table(self.params)
        # Those whose former memory may still be looked at from outside torch, and is let go of when that has ended.
        self._kept = [p for p in self.params if not release_previous(p)]
        self.grads = FlatGrads(self.params, self._offsets, param_flat.numel())
        self._states: dict[str, FlatBuffer] = {}
        self._state_views: dict[str, list[Tensor]] = {}
        self._scratch: dict[str, FlatBuffer] = {}
        self._twin: weakref.ref[Twin] | None = None
        self._copied: Tensor | None = None
        # Float, on the host: torch.optim's `step` entries are such tensors, and here they are views of this one.
        self._steps = FlatBuffer(len(params), torch.float32, torch.device("cpu"))
        self._counts = self._steps.flat.numpy()  # the same memory; numpy is quicker with a handful of numbers
        self._runs: list[Run] = []
        self._runs_states: bytes | None = None

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Elements [begin, end) of the slots ``first`` to ``last``, their padding included."""
        return self._offsets[first], self._ends[last]

    def broken(self) -> list[int]:
        """Indices of the parameters that no longer lie in their slot (``p.data = …``, ``.to()``, another fusion)."""
        if self._kept:
            self._kept = [p for p in self._kept if not release_previous(p)]
        return self._table.broken(self.params)

    # State

    @property
    def state_dtype(self) -> torch.dtype:
        """float32 for float16 and bfloat16 parameters: their updates are computed in it; else their own dtype."""
        return wide_dtype(self.param_flat.dtype)

    def state_flat(self, name: str) -> Tensor:
        """The buffer of state ``name``, allocated with zeros at first use."""
        buffer = self._states.get(name)
        if buffer is None:
            buffer = self._states[name] = FlatBuffer(self.param_flat.numel(), self.state_dtype, self.param_flat.device)
            self._state_views[name] = buffer.views_like(self.params, self._offsets)
        return buffer.flat

    def scratch_flat(self, name: str) -> Tensor:
        """Memory like a state's, but for intermediate values only: it is never shown, saved or zeroed."""
        buffer = self._scratch.get(name)
        if buffer is None:
            buffer = self._scratch[name] = FlatBuffer(self.param_flat.numel(), self.state_dtype, self.param_flat.device)
        return buffer.flat

    def scalar_flat(self, name: str) -> Tensor:
        """A state of one number for each parameter, allocated with zeros at first use."""
        buffer = self._states.get(name)
        if buffer is None:
            buffer = self._states[name] = FlatBuffer(len(self.params), self.state_dtype, self.param_flat.device)
            self._state_views[name] = [buffer.view(i, (), ()) for i in range(len(self.params))]
        return buffer.flat

    def placed(self, first: int, last: int) -> list[tuple[Tensor, int]]:
        """The parameters ``first`` to ``last``, each with its offset in the group's flat tensors."""
        return list(zip(self.params[first : last + 1], self._offsets[first : last + 1], strict=True))

    def state_view(self, name: str, index: int, *, scalar: bool = False) -> Tensor:
        """State ``name`` of one parameter: shaped like it, or 0-dim for a state of one number."""
        if scalar:
            self.scalar_flat(name)
        else:
            self.state_flat(name)
        return self._state_views[name][index]

    def step_view(self, index: int) -> Tensor:
        """The step count of one parameter: float32, 0-dim, on the host."""
        return self._steps.view(index, (), ())

    def set_step(self, index: int, step: float) -> None:
        """Set the step count of one parameter."""
        self._counts[index] = step
        self._runs_states = None

    def set_steps(self, first: int, last: int, step: float) -> None:
        """Set the step counts of the slots ``first`` to ``last``, which are those of one run."""
        self._counts[first : last + 1] = step

    def step_of(self, index: int) -> int:
        """The step count of one parameter."""
        return int(self._counts[index])

    def twin(self, tensors: Sequence[Tensor | None]) -> Twin | None:
        """Move ``tensors``, one or None for each parameter, into a buffer of their own that is laid out like this one.

        Only those move that are shaped and strided like their parameter, own their storage, and share a dtype.

        Returns:
            The buffer, or None where nothing can move.
        """
        movable = [
            (i, t)
            for i, (t, p) in enumerate(zip(tensors, self.params, strict=True))
            if t is not None
            and (t.device, t.size(), t.stride(), t.storage_offset()) == (p.device, p.size(), p.stride(), 0)
            and storage_numel(t) == t.numel() > 0
            and _may_move([t])
        ]
        movable = [(i, t) for i, t in movable if t.dtype == movable[0][1].dtype]
        if not movable:
            return None
        moved = [t for _, t in movable]
        buffer = FlatBuffer(self.param_flat.numel(), moved[0].dtype, moved[0].device)
        slots = tuple(Slot(self._offsets[i], t.numel(), t.numel()) for i, t in movable)
        buffer.adopt(moved, Layout(slots, tuple(range(len(slots))), buffer.flat.numel()))
        twin = Twin(buffer.flat, moved)
        self._twin = weakref.ref(twin)
        return twin

    def take_copy(self) -> Tensor | None:
        """The buffer of the last ``twin``, if still in use, for an op that writes it together with ``param_flat``."""
        twin = None if self._twin is None else self._twin()
        self._copied = None if twin is None else twin.flat
        return self._copied

    def has_copied_to(self, twin: Twin) -> bool:
        """True where the last step has brought all parameters to ``twin``."""
        return self._copied is twin.flat

    # Steps

    def advance(self, states: bytes, on_join: Callable[[int], None], *, counted: bool = True) -> list[Run]:
        """Cut the slots that are PRESENT in ``states`` into runs, and count one step for each of them.

        Args:
            states: What ``grads.gather()`` returned.
            on_join: Called with the index of every such slot whenever the runs are cut anew, before counting.
            counted: False leaves the step counts as they are: the rule keeps no state.
        """
        self._copied = None
        if states != self._runs_states or not all(self._is_uniform(run) for run in self._runs):
            self._partition(states, on_join)
        for run in self._runs:
            # The buffer is the truth: it is what a checkpoint shows, and a user may have set it.
            counts = self._counts[run.first : run.last + 1]
            run.step_before = float(counts[0])
            if counted:
                counts += 1
            run.step = int(counts[0])
        return self._runs

    def _is_uniform(self, run: Run) -> bool:
        counts = self._counts[run.first : run.last + 1]
        return bool((counts == counts[0]).all())

    def _partition(self, states: bytes, on_join: Callable[[int], None]) -> None:
        self._runs_states = None  # for as long as it takes: memory may run out in on_join
        steps: list[float] = self._counts.tolist()
        keys: list[Hashable] = [step if state == PRESENT else None for step, state in zip(steps, states, strict=True)]
        self._runs = [Run(self, first, last, int(steps[first])) for first, last in _equal_neighbours(keys)]
        for run in self._runs:
            for index in range(run.first, run.last + 1):
                on_join(index)
        self._runs_states = states


def _equal_neighbours(keys: Sequence[Hashable]) -> Iterable[tuple[int, int]]:
    """Maximal (first, last) index pairs over which ``keys`` are equal and not None."""
    first = 0
    for i in range(1, len(keys) + 1):
        if i == len(keys) or keys[i] != keys[first]:
            if keys[first] is not None:
                yield first, i - 1
            first = i


class Twin:
    """Tensors in a buffer laid out like a ``FusedGroup``'s.

    Attributes:
        flat: 1-D, as long as the group's; where a parameter has no twin it holds anything.
        params: The tensors.
    """

    def __init__(self, flat: Tensor, params: Sequence[Tensor]) -> None:
        """Over memory that ``params`` already lie in."""
        self.flat = flat
        self.params = list(params)
        self._table = slot_table(self.params)
        self._kept = [p for p in self.params if not release_previous(p)]

    def broken(self) -> bool:
        """True once a tensor no longer lies where it did."""
        if self._kept:
            self._kept = [p for p in self._kept if not release_previous(p)]
        return bool(self._table.broken(self.params))


def step_in_place(param: Tensor) -> FusedGroup:
    """A group of one parameter that stays where it lies, because its memory belongs to someone else."""
    flat = param.detach().as_strided((param.numel(),), (1,), param.storage_offset())
    return FusedGroup([param], flat, [0], [param.numel()])


def fuse(params: Sequence[Tensor]) -> list[FusedGroup]:
    """Fuse ``params`` into as few groups as possible: one per device and dtype.

    A parameter that is a view of another owner's buffer, or overlaps an earlier one (tied through ``.data``), does not
    move: it gets a group of its own, over the memory it lies in.

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
    movable, in_place = _sort_out(params)
    plans = [(members, plan(members)) for members in movable]
    buffers = [FlatBuffer(p.layout.total_numel, p.dtype, p.device) for _, p in plans]
    groups = []
    for (members, planned), buffer in zip(plans, buffers, strict=True):
        buffer.adopt(members, planned.layout)
        order = sorted(range(len(members)), key=planned.offsets.__getitem__)
        offsets = [planned.offsets[i] for i in order]
        ends = [*offsets[1:], planned.layout.total_numel]
        groups.append(FusedGroup([members[i] for i in order], buffer.flat, offsets, ends))
    return groups + [step_in_place(p) for p in in_place]


def _may_move(sharing: list[Tensor]) -> bool:
    """True where the one storage of ``sharing`` is theirs alone, and all who look at it would follow."""
    if not owns_storage(sharing) or not owns_memory(sharing[0]) or len({p.dtype for p in sharing}) > 1:
        return False
    return follows_aliases() or not has_unnamed_aliases(sharing)


def _sort_out(params: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Movable parameters by device and dtype, and those to be left in place."""
    by_storage: dict[int, list[Tensor]] = {}
    for p in params:
        by_storage.setdefault(p.untyped_storage()._cdata, []).append(p)
    movable: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    in_place: list[Tensor] = []
    for sharing in by_storage.values():
        distinct, overlapping = _split_overlapping(sharing)
        if not _may_move(sharing) or (overlapping and not follows_aliases()):
            in_place.extend(sharing)
            continue
        in_place.extend(overlapping)
        for p in distinct:
            movable.setdefault((p.device, p.dtype), []).append(p)
    return list(movable.values()), in_place


def _split_overlapping(sharing: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of one storage that do not overlap any before them, and those that do."""
    distinct: list[Tensor] = []
    overlapping: list[Tensor] = []
    taken: list[tuple[int, int]] = []
    for p in sharing:
        begin = int(p.storage_offset())
        end = begin + extent_numel(p.size(), p.stride())
        if any(begin < other_end and other_begin < end for other_begin, other_end in taken):
            overlapping.append(p)
        else:
            taken.append((begin, end))
            distinct.append(p)
    return distinct, overlapping
