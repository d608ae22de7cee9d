# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which part of a fused group steps in one go, and what an update rule finds there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from apex_npu.ops import Segments, is_placed
from apex_npu.ops.reference_segments import segment_ids

if TYPE_CHECKING:
    from apex_npu.fusion.fused_group import FusedGroup

_T = TypeVar("_T")


class Run:
    """Consecutive slots that take part in a step and share a step count; usually the whole buffer.

    Attributes:
        params: The parameters themselves.
        param: 1-D, dtype of the parameters; padding between slots included.
        step: How many times these slots have been updated, this time included. A 0-dim tensor where the device counts.
        counted: What has been added to that for this step.
        is_listed: Whether a gradient is outside of its slot, for a rule that takes ``grads`` and ``states(name)``.
        grad_scale: What gradients have yet to be divided by, one float32 number; None: they are as they should be.
        found_inf: Where not 0, nothing is to be written: one float32 number; None: gradients have not overflowed.
    """

    def __init__(self, group: FusedGroup, first: int, last: int, *, loose: bool = False) -> None:
        """The slots ``first`` to ``last`` of ``group``, both included; ``loose``: a gradient is outside of its slot."""
        # Weakly, since the group holds its runs: a cycle would keep all memory until Python looks for cycles.
        self._of = weakref.ref(group)
        self.first, self.last = first, last
        self.params = group.params[first : last + 1]
        self._begin, self._end = group.span(first, last)
        if loose and first == last:
            self._end = self._begin + self.params[0].numel()  # its gradient has no padding
        self._loose = loose
        self.is_listed = loose and group.grads.reads_lists
        self.step: int | Tensor = 0
        self.counted: float | Tensor = 0.0
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.param = group.param_flat[self._begin : self._end]
        self._slices: dict[tuple[str, str], Tensor] = {}
        self._segments: dict[bool, Segments] = {}
        self._remembered: dict[str, tuple[object, Any]] = {}
        self._kept: list[Any] | None = None

    @property
    def _group(self) -> FusedGroup:
        group = self._of()
        assert group is not None
        return group

    @property
    def _range(self) -> range:
        return range(self.first, self.last + 1)

    def keep(self) -> None:
        """A captured graph reads what is remembered: from now on it outlives what takes its place."""
        self._kept = self._kept or []

    def take_back(self) -> None:
        """Count the step that ``FusedGroup.advance`` has counted no longer: it could not be taken."""
        self._group.add_to_steps(self.first, self.last, -self.counted)

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
            if self._kept is not None:
                self._kept.append(self._remembered.get(name))
            self._remembered[name] = (value, make())
        remembered: _T = self._remembered[name][1]
        return remembered

    def wide_param(self) -> Tensor:
        """``param`` in the state's dtype: itself, or a copy that ``write_back`` rounds into it."""
        if self.param.dtype == self._group.state_dtype:
            return self.param
        return self.scratch("param").copy_(self.param)

    @property
    def grads(self) -> list[Tensor]:
        """The gradients of ``params``, wherever they are."""
        return [p.grad for p in self.params if p.grad is not None]

    def states(self, name: str) -> list[Tensor]:
        """State ``name`` of each of ``params``."""
        return self._group.state_views(name)[self.first : self.last + 1]

    @property
    def scaled_grad(self) -> Tensor:
        """The gradients as they lie in their buffer, or where autograd left them; for ops alone, and not to be written.

        It may have no memory: only ops with a ``grad_scale``, and ``norm``, know how to read it.
        """
        if self.is_listed:
            self._group.grads.gather(self._range)
        elif self._loose:  # asked for again: a reference would keep its memory
            return self._group.grads.operand(self._range, self._end - self._begin, stepped=True)
        return self._slice("grad", "", lambda _: self._group.grads.flat)

    @property
    def flat_grad(self) -> Tensor:
        """``scaled_grad``, brought into memory that anything can read; not to be written."""
        if self._loose and is_placed(grad := self.scaled_grad):
            del grad
            self._group.grads.gather(self._range)
            return self._group.grads.flat[self._begin : self._end]
        return self.scaled_grad

    @property
    def grad(self) -> Tensor:
        """The gradients, of the dtype of the parameters; a copy where they have to be divided first."""
        return self.flat_grad if self.grad_scale is None else self.wide_grad().to(self.param.dtype)

    def wide_grad(self) -> Tensor:
        """The gradients in the state's dtype, not to be written; a copy where they have another, or have a scale."""
        flat = self.flat_grad
        if flat.dtype == self._group.state_dtype and self.grad_scale is None:
            return flat
        grad = self.scratch("grad").copy_(flat)
        return grad if self.grad_scale is None else grad.div_(self.grad_scale)

    def model_param(self) -> Tensor | None:
        """The low-precision copy of ``param``, for an op that writes both; None: nobody wants one."""
        copy = self._group.take_copy(self.last - self.first + 1)
        return None if copy is None else copy[self._begin : self._end]

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
