# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters, gradients and state of one (param_group, device, dtype), flat, and which parts step together."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from apex_npu.fusion.flat_buffer import FlatBuffer, leave_private_formats, may_move
from apex_npu.fusion.flat_grads import FlatGrads
from apex_npu.fusion.grad_slots import ABSENT, FOREIGN, LOOSE, PRESENT
from apex_npu.fusion.layout import Layout, Slot
from apex_npu.fusion.run import Run
from apex_npu.fusion.step_counts import step_counts
from apex_npu.fusion.storage import is_slot, release_previous, slot_table, storage_numel
from apex_npu.ops import wide_dtype


class HasFusedGroups(Protocol):
    """What amp needs to know of an optimizer that fuses by itself."""

    def flat_grads(self) -> list[FlatGrads]:
        """The gradient buffers of all parameters, fused now if they were not."""
        ...

    def fused_groups(self) -> list[FusedGroup]:
        """What the last step has stepped."""
        ...


class FusedGroup:
    """The flat buffers of some parameters.

    Attributes:
        params: Of one dtype and device, dense, not overlapping.
        param_flat: 1-D over the memory of all of them.
        grads: Their gradients, laid out alike.
        in_slots: Whether all lie in fused buffers, by which an alias is known; else one has stayed where it was.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        param_flat: Tensor,
        offsets: Sequence[int],
        ends: Sequence[int],
        *,
        capturable: bool = False,
    ) -> None:
        """Over memory that ``params`` already lie in; see ``fuse`` for how they get there, and for ``capturable``."""
        self.params = list(params)
        self.param_flat = param_flat
        self._offsets = list(offsets)
        self._ends = list(ends)
        self.in_slots = all(map(is_slot, self.params))
        self._table = slot_table(self.params)
        # Those whose former memory may still be looked at from outside torch, and is let go of when that has ended.
        self._kept = [p for p in self.params if not release_previous(p)]
        self.grads = FlatGrads(self.params, self._offsets, param_flat.numel())
        self._states: dict[str, FlatBuffer] = {}
        self._state_views: dict[str, list[Tensor]] = {}
        # What a state's buffer was filled with, if not with zeros, and the slots that may hold something else by now.
        self._initial: dict[str, float] = {}
        self._used = bytearray(len(self.params))
        self._scratch: dict[str, FlatBuffer] = {}
        self._twin: weakref.ref[Twin] | None = None
        self._copied: weakref.ref[Twin] | None = None
        self._copied_count = 0
        self._steps = step_counts(len(params), param_flat.device, capturable=capturable)
        self._runs: list[Run] = []
        self._runs_states: bytes | None = None
        self._captured: list[Run] = []
        self._has_warned = False

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
        self._state(name, scalar)
        return self._state_views[name][index]

    def reset_state(self, name: str, index: int, initial: float, *, scalar: bool = False) -> None:
        """Have state ``name`` of one parameter be ``initial``; nothing is launched where it is that already."""
        if name not in self._states and initial:
            self._state(name, scalar).fill_(initial)
            self._initial[name] = initial
        view = self.state_view(name, index, scalar=scalar)
        if self._used[index] or initial != self._initial.get(name, 0.0):
            view.fill_(initial)

    def _state(self, name: str, scalar: bool) -> Tensor:
        return self.scalar_flat(name) if scalar else self.state_flat(name)

    def step_view(self, index: int) -> Tensor:
        """The step count of one parameter: float32, 0-dim."""
        return self._steps.view(index)

    def state_views(self, name: str) -> list[Tensor]:
        """State ``name`` of all parameters."""
        self.state_flat(name)
        return self._state_views[name]

    def set_step(self, index: int, step: float) -> None:
        """Set the step count of one parameter."""
        self._steps.set(index, step)
        self._used[index] |= step != 0
        self._runs_states = None

    def add_to_steps(self, first: int, last: int, addend: float | Tensor) -> None:
        """Add to the step counts of the slots ``first`` to ``last``, which are those of one run."""
        self._steps.add(first, last, addend)
        self._steps.settle()

    def is_new(self, index: int) -> bool:
        """True for a parameter that has never been stepped."""
        return self._steps.is_new(index)

    def twin(self, tensors: Sequence[Tensor | None]) -> Twin | None:
        """Move ``tensors``, one or None for each parameter, into a buffer of their own that is laid out like this one.

        Only those move that are shaped and strided like their parameter, own their storage, and share a dtype. Private
        formats are left first.

        Returns:
            The buffer, or None where nothing can move.
        """
        leave_private_formats([t for t in tensors if t is not None])
        movable = [
            (i, t)
            for i, (t, p) in enumerate(zip(tensors, self.params, strict=True))
            if t is not None
            and (t.device, t.size(), t.stride(), t.storage_offset()) == (p.device, p.size(), p.stride(), 0)
            and storage_numel(t) == t.numel() > 0
            and may_move([t])
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

    def take_copy(self, count: int) -> Tensor | None:
        """The buffer of the last ``twin``, if still in use, for an op that brings ``count`` parameters there, too."""
        twin = None if self._twin is None else self._twin()
        self._copied = None if twin is None else self._twin
        self._copied_count += count
        return None if twin is None else twin.flat

    def has_copied_to(self, twin: Twin) -> bool:
        """True where the last step has brought all parameters to ``twin``."""
        copied_to = None if self._copied is None else self._copied()
        return copied_to is twin and self._copied_count == len(self.params)

    def forget_copy(self) -> None:
        """A new step begins, whether or not it steps this group."""
        self._copied, self._copied_count = None, 0

    # Steps

    def is_cut(self, states: bytes) -> bool:
        """True where ``advance`` would step the same runs as the last time."""
        return states == self._runs_states and self._steps.uniform([(run.first, run.last) for run in self._runs])

    def advance(self, states: bytes, on_join: Callable[[int], None], *, addend: float | Tensor = 1.0) -> list[Run]:
        """Cut the slots that are PRESENT or LOOSE in ``states`` into runs, and count one step for each of them.

        Args:
            states: What ``grads.gather()`` returned.
            on_join: Called with the index of every such slot whenever the runs are cut anew, before counting.
            addend: 1; or 0, where the rule keeps no state, or the step is one to be skipped.
        """
        if not self.is_cut(states):
            self._partition(states, on_join)
        for run in self._runs:
            if isinstance(addend, Tensor) or addend:
                self._steps.add(run.first, run.last, addend)
            run.counted = addend
            # The buffer is the truth: it is what a checkpoint shows, and a user may have set it.
            run.step = self._steps.of_run(run.first)
        self._steps.settle()
        return self._runs

    def steps_as_before(self) -> bool:
        """True where ``advance`` would step the same runs as the last time, with gradients as they are now."""
        states = self.grads.states().replace(bytes([FOREIGN]), bytes([PRESENT]))
        return not states.strip(bytes([ABSENT])) or self.is_cut(states)

    def keep_runs(self) -> None:
        """A graph is being captured that reads the tables of these runs for as long as it is replayed."""
        for run in self._runs:
            run.keep()
        self._captured += [run for run in self._runs if run not in self._captured]
        self._has_warned = False

    def _warn_of_graphs(self, stepping: Sequence[bool]) -> None:
        """A graph counts steps for a run as a whole: one part of it must not have more than the rest."""
        parted = [run for run in self._captured if 0 < sum(stepping[run.first : run.last + 1]) < len(run.params)]
        if parted and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "parameters that a captured CUDA graph steps together are being stepped apart, some of them without a "
                "gradient now. Do not replay that graph any more, since it takes their step counts for equal; capture "
                "anew",
                RuntimeWarning,
                stacklevel=2,
            )

    def _partition(self, states: bytes, on_join: Callable[[int], None]) -> None:
        self._runs_states = None  # for as long as it takes: memory may run out in on_join
        stepping = [state != ABSENT for state in states]
        self._warn_of_graphs(stepping)
        self._steps.set_apart(stepping)
        labels = self._steps.labels()
        keys: list[Hashable] = [None if state == ABSENT else key for key, state in zip(labels, states, strict=True)]
        for i, state in enumerate(states):
            if state == LOOSE and not self.grads.reads_in_place and not self.grads.reads_lists:
                keys[i] = (i,)  # alone
        self._runs = [
            Run(self, first, last, loose=LOOSE in states[first : last + 1]) for first, last in _equal_neighbours(keys)
        ]
        for run in self._runs:
            for index in range(run.first, run.last + 1):
                on_join(index)
                self._used[index] = 1
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
