# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs: the slots of an arena that step together, their step counts, and the operands of update rules."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from apex_npu.fusion.encoded_state import MASTER_PARAM
from apex_npu.fusion.flat_buffer import FlatBuffer, numbers_in
from apex_npu.fusion.grad_slots import ELSEWHERE, NONE
from apex_npu.fusion.group_buffers import GroupBuffers
from apex_npu.ops import Places, RunEncoding, Segments
from apex_npu.ops.encoded_calls import is_encoded
from apex_npu.ops.reference import segment_ids

_T = TypeVar("_T")

_FLOAT32 = struct.Struct("=f")
_SIZE = _FLOAT32.size


class _Slices(dict[str, Tensor]):
    """Slices of an arena's named flat tensors over one range; each is made once."""

    def __init__(
        self, of: Callable[[], GroupBuffers | None], flat: Callable[[GroupBuffers, str], Tensor], span: slice
    ) -> None:
        self._of, self._flat, self._span = of, flat, span

    def __missing__(self, name: str) -> Tensor:
        group = self._of()
        assert group is not None
        self[name] = found = self._flat(group, name)[self._span]
        return found


class Run:
    """Consecutive slots that take part in a step, and share a step count and a param group.

    Attributes:
        slots: The slots of the arena.
        place: The index of the run's param group, and the index of its first parameter there.
        params: The parameters themselves.
        param: The parameters as one 1-D tensor of their dtype, padding between slots included.
        elsewhere: A gradient is outside of its slot.
        state: A function that returns the flat state of a name: float32 for low-precision parameters, else of their
            dtype; zeros at first. It raises TypeError if the state is stored in fewer bytes.
        stored: A function that returns the flat state of a name as it is stored, for the rule's own op.
        scratch: A function that returns flat memory of a name for this step's intermediate values, of the state's
            dtype, with arbitrary values.
        step: The number of updates of these slots, this one included. A 0-dim tensor if the device counts.
        grad_scale: The divisor that must still be applied to gradients, one float32 number; None: no division.
        found_inf: One float32 number; unless it is 0, nothing may be written. None: gradients have not overflowed.
    """

    def __init__(self, group: GroupBuffers, counts: StepCounts, slots: range, *, elsewhere: bool = False) -> None:
        """Run the ``slots`` of ``group``, whose steps are in ``counts``; ``elsewhere`` is the attribute."""
        # A weak reference, since the group holds its runs: a cycle would keep all memory until garbage collection.
        self._of = weakref.ref(group)
        self._counts, self._encoding = counts, group.encoding
        self.slots, self.place = slots, group.places[slots.start]
        self.params = group.params[slots.start : slots.stop]
        self.elsewhere = elsewhere
        begin, end = group.span(slots)
        self._span = slice(begin, end)
        self.param = group.param_flat[self._span]
        self.step: int | Tensor = 0
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._grad: Tensor | None = None
        # Bound methods, because each step requests flat states and scratch memory.
        self.state = self.stored = _Slices(self._of, GroupBuffers.state_flat, self._span).__getitem__
        if self._encoding is not None:
            segments = self._encoding.segments[slots.start : slots.stop]
            self._places = Places([segment._replace(begin=segment.begin - begin) for segment in segments])
            # Not a method of this object, which would refer to itself.
            self.state = partial(_state_in_float32, self._encoding.formats, self.stored)
        self.scratch = _Slices(self._of, GroupBuffers.scratch_flat, self._span).__getitem__
        self._remembered: dict[str, tuple[object, Any]] = {}
        self._kept: list[Any] | None = None

    @property
    def _group(self) -> GroupBuffers:
        group = self._of()
        assert group is not None
        return group

    def keep(self) -> None:
        """Keep results of ``remember`` alive after they are replaced, since a captured graph reads them."""
        self._kept = self._kept or []

    def undo_count(self) -> None:
        """Undo the count of a step by ``StepCounts.add``, because the step has failed."""
        self._counts.undo(self.slots)

    def per_param(self, name: str) -> Tensor:
        """Return state ``name`` of one number for each parameter: 1-D, of the state's dtype."""
        return self._group.scalar_flat(name)[self.slots.start : self.slots.stop]

    def remember(self, name: str, value: object, make: Callable[[], _T]) -> _T:
        """Return the result of ``make``, which is called again only if ``value`` changes."""
        if name not in self._remembered or self._remembered[name][0] != value:
            if self._kept is not None:
                self._kept.append(self._remembered.get(name))
            self._remembered[name] = (value, make())
        remembered: _T = self._remembered[name][1]
        return remembered

    @property
    def encoding(self) -> RunEncoding | None:
        """The argument of the rule's own op if ``param`` or states are stored in fewer bytes, else None."""
        if self._encoding is None:
            return None
        remainder = self.stored(MASTER_PARAM) if MASTER_PARAM in self._encoding.formats else None
        return RunEncoding(self._places, self._encoding.scales, self.step, remainder, self._encoding.stochastic_param)

    def wide_param(self) -> Tensor:
        """Return ``param``, or if its dtype is narrower or it is encoded, a copy for ``write_back``."""
        encoding = self.encoding
        if encoding is not None and encoding.encodes_param:
            return encoding.decode_param(self.param, slice(0, self.param.numel()))
        if self.param.dtype == self._group.state_dtype:
            return self.param
        return self.scratch("param").copy_(self.param)

    @property
    def scaled_grad(self) -> Tensor:
        """The undivided gradients, in their buffer or where autograd left them; read-only.

        The tensor may have no memory, so that only ops with a ``grad_scale``, and ``norm``, can read it.
        """
        if self.elsewhere:  # not kept, which would keep the memory of gradients
            return self._group.grads.operand(self.slots, self.param.numel(), writable=False)
        if self._grad is None:
            self._grad = self._group.grads.flat[self._span]
        return self._grad

    @property
    def flat_grad(self) -> Tensor:
        """The undivided gradients, in memory that any operator can read; read-only."""
        if self.elsewhere:
            self._group.grads.gather(self.slots)
            return self._group.grads.flat[self._span]
        return self.scaled_grad

    @property
    def grad(self) -> Tensor:
        """The gradients, of the dtype of the parameters; a copy if they have to be divided first."""
        return self.flat_grad if self.grad_scale is None else self.wide_grad().to(self.param.dtype)

    def wide_grad(self) -> Tensor:
        """Return the gradients in the state's dtype, read-only; a copy if they have another dtype or a scale."""
        flat = self.flat_grad
        if flat.dtype == self._group.state_dtype and self.grad_scale is None:
            return flat
        grad = self.scratch("grad").copy_(flat)
        return grad if self.grad_scale is None else grad.div_(self.grad_scale)

    def wide_state(self, name: str) -> Tensor:
        """Return ``state(name)`` for any operator; if it is encoded, a decoded copy for ``write_back``."""
        stored, encoding = self.stored(name), self.encoding
        return stored if encoding is None or not is_encoded(stored) else encoding.decode_state(name, stored)

    def write_back(self, param: Tensor, **states: Tensor) -> None:
        """Round the result of ``wide_param``, changed by a rule, into ``param``; encode those of ``wide_state``.

        Args:
            param: The parameters.
            states: All results of ``wide_state``, by name, in the order of the rule.
        """
        encoding = self.encoding
        if encoding is not None:
            kept = [(index, name, self.stored(name), states[name]) for index, name in enumerate(states)]
            encoding.encode_run(param, self.param, [state for state in kept if is_encoded(state[2])])
        if param is not self.param and (encoding is None or not encoding.encodes_param):
            self.param.copy_(param)

    def segments(self, *, rows: bool = False) -> Segments:
        """Return the range of each parameter in the flat tensors, without padding; with ``rows``, of each row."""
        return self.remember(f"segments, rows={rows}", None, lambda: self._find_segments(rows))

    def _find_segments(self, rows: bool) -> Segments:
        starts: list[int] = []
        lengths: list[int] = []
        scattered: list[tuple[Tensor, int, int]] = []
        for p, offset in self.members():
            count = row_count(p) if rows else 1
            length = p.numel() // count
            if count > 1 and p.stride(0) != length:
                scattered.append((p, offset, len(starts)))  # a transposed matrix: its rows are not contiguous
            starts += [offset + i * length for i in range(count)]
            lengths += [length] * count
        segments = Segments.of(starts, lengths, self.param.numel(), self.param.device)
        if not scattered:
            return segments
        ids = segment_ids(segments.starts, segments.lengths, self.param.numel(), self.param.device)
        for p, offset, first in scattered:
            row = torch.arange(first, first + p.size(0), device=p.device).view(-1, *[1] * (p.dim() - 1))
            ids[offset : offset + p.numel()].as_strided(p.size(), p.stride(), ids.storage_offset() + offset).copy_(row)
        return segments._replace(ids=ids)

    def members(self) -> list[tuple[Tensor, int]]:
        """Return the run's parameters, each with its offset in the run's flat tensors, in elements."""
        offsets = self._group.grads.offsets
        return [(p, offsets[i] - self._span.start) for i, p in zip(self.slots, self.params, strict=True)]


def _state_in_float32(encoded: Collection[str], stored: Callable[[str], Tensor], name: str) -> Tensor:
    if name in encoded:
        raise TypeError(
            f"{name!r} is stored in fewer bytes than float32, and only the rule's own op can read it: leave "
            f"state_dtype out, or pass run.stored({name!r}) and run.encoding to that op"
        )
    return stored(name)


class StepCounts:
    """The step count of each slot, on the host: float32 numbers, which torch.optim shows as ``step``.

    Only the buffer has the counts: checkpoints show it, and a user may write to a ``view`` of it.

    Attributes:
        added: The data with which ``undo`` undoes ``add``; None if ``add`` has not been called in this step.
    """

    def __init__(self, count: int) -> None:
        self._buffer = FlatBuffer(count, torch.float32, torch.device("cpu"))
        # The same memory as bytes: calls of torch or numpy would take as long as the rest of a small step.
        numbers: Any = self._buffer.flat.numpy()
        self._bytes = memoryview(numbers).cast("B")
        self._after = self._bytes.tobytes()
        self._numbers: list[Tensor] = []
        self.added: Any = None

    def view(self, index: int) -> Tensor:
        """Return the count of one slot: float32, 0-dim."""
        self._numbers = self._numbers or numbers_in(self._buffer.flat)
        return self._numbers[index]

    def renew_views(self) -> None:
        """Make new views, since a script has given some of those that it was shown other memory."""
        self._numbers = []

    def set(self, index: int, count: float) -> None:
        """Set the count of one slot."""
        _FLOAT32.pack_into(self._bytes, index * _SIZE, count)

    def is_new(self, index: int) -> bool:
        """Return True for a slot that has never been stepped."""
        return int(_FLOAT32.unpack_from(self._bytes, index * _SIZE)[0]) == 0

    def labels(self, stepping: Sequence[bool]) -> list[Hashable]:
        """Return one label per slot, equal if counts are equal. Only ``stepping`` slots take part in the next steps."""
        return list(self._bytes.cast("f"))

    def is_written(self) -> bool:
        """Return True if counts have been written since the last ``add``, so that a run may have different counts."""
        return self._bytes.tobytes() != self._after

    def add(self, runs: Runs, addend: float | Tensor) -> None:
        """Count one step for each of ``runs``; ``addend`` is 0 if the rule has no state, or the step is skipped.

        Counts on a device are 0-dim tensors, and are added to by the ``stretches`` of ``runs``, in fewer launches.
        """
        self.added = self._bytes.tobytes()
        for run in runs.current:
            begin, end = run.slots.start * _SIZE, run.slots.stop * _SIZE
            count = _FLOAT32.unpack_from(self.added, begin)[0] + float(addend)
            self._bytes[begin:end] = _FLOAT32.pack(count) * len(run.slots)
            run.step = int(count)
        self._after = self._bytes.tobytes()

    def undo(self, slots: range) -> None:
        """Undo ``add`` for ``slots``, if ``add`` has been called in this step."""
        if self.added is not None:
            span = slice(slots.start * _SIZE, slots.stop * _SIZE)
            self._bytes[span] = self.added[span]


class Runs:
    """The runs that the slots of an arena are cut into, used again while the same slots step together.

    Attributes:
        counts: The step counts of the slots.
        current: The runs of the last step.
        stretches: Their slots, in as few slices as possible.
        is_captured: A CUDA graph steps some of the runs.
    """

    is_captured = False

    def __init__(self, counts: StepCounts) -> None:
        self.counts = counts
        self.current: list[Run] = []
        self._states: bytes | None = None
        self.stretches: list[slice] = []

    def cut(self, group: GroupBuffers, states: bytes, on_cut: Callable[[range], None]) -> list[Run]:
        """Cut the slots of ``group`` with a gradient into runs, unless the last runs still fit.

        Args:
            group: The group of these runs.
            states: The result of ``grads.gather()``.
            on_cut: Called with the slots of each run whenever the runs are cut again.
        """
        if states != self._states or self.counts.is_written():
            self._states = None  # until the end: memory may run out in on_cut
            self.current = self._cut(group, states)
            for run in self.current:
                on_cut(run.slots)
            stepping = [None if state == NONE else True for state in states]
            self.stretches = [slice(slots.start, slots.stop) for slots in _equal_neighbours(stepping)]
            self._states = states
        self.counts.added = None
        return self.current

    def forget(self) -> None:
        """Make the next step cut the runs again, after counts or param groups have been set."""
        self._states = None

    def _cut(self, group: GroupBuffers, states: bytes) -> list[Run]:
        labels = self.counts.labels([state != NONE for state in states])
        keys: list[Hashable] = [
            None if state == NONE else (label, index)
            for label, (index, _), state in zip(labels, group.places, states, strict=True)
        ]
        if group.chunk_of:
            keys = [key and (key, chunk) for key, chunk in zip(keys, group.chunk_of, strict=True)]
        if group.encoding is not None:
            group.encoding.divide(keys)
        return [
            Run(group, self.counts, slots, elsewhere=ELSEWHERE in states[slots.start : slots.stop])
            for slots in _equal_neighbours(keys)
        ]


def _equal_neighbours(keys: Sequence[Hashable]) -> Iterable[range]:
    """Return the maximal ranges of indices over which ``keys`` are equal and not None."""
    first = 0
    for i in range(1, len(keys) + 1):
        if i == len(keys) or keys[i] != keys[first]:
            if keys[first] is not None:
                yield range(first, i)
            first = i


def row_count(param: Tensor) -> int:
    """Return the number of rows of a parameter along its first dimension; vectors and numbers count as one row."""
    return int(param.size(0)) if param.dim() > 1 and param.numel() else 1
