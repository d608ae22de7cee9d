# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Computation on whole matrices whose rows or columns are distributed over processes.

Each matrix has one owner. An all-to-all sends the parts of a matrix to the owner, which computes, and another
all-to-all returns the parts of the result. Every matrix is computed once, and the processes share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from apex_npu.distributed.consistency import naming_failure
from apex_npu.fusion.shards import MatrixCut

# The number of elements that a process owns of a batch, unless a single matrix has more.
_OWNED_NUMEL = 1 << 24

Compute = Callable[[Tensor, Any], None]


class MatrixPart(NamedTuple):
    """The part of a matrix that this process has.

    Attributes:
        here: The part: 2-D, read and written.
        rows: The rows of the whole matrix.
        columns: The columns of the whole matrix.
        cut: The division of the matrix; None: ``here`` is the whole matrix.
        dtype: The dtype in which the matrix is sent and computed.
        kind: The options of the computation, equal on all processes.
    """

    here: Tensor
    rows: int
    columns: int
    cut: MatrixCut | None
    dtype: torch.dtype
    kind: Hashable


class MatrixExchange:
    """Computes on whole matrices, in batches of equal shape that are divided alike.

    While a batch is computed, the next one is on its way to its owners, and the previous one on its way back.
    """

    def __init__(self, parts: Sequence[MatrixPart]) -> None:
        """Divide matrices among owners: each goes to the process with the least work so far.

        Args:
            parts: The matrices. Each group has the same matrices, in the same order, on all of its processes. Their
                tensors are kept.
        """
        groups: dict[int, list[MatrixPart]] = {}
        for part in parts:
            if part.rows * part.columns:
                groups.setdefault(id(part.cut and part.cut.group), []).append(part)
        # A process that is in two groups sends in the order of each: other processes are in one of them.
        self._groups = list(map(_batches, groups.values()))

    @torch.no_grad()
    def apply(self, compute: Compute) -> None:
        """Replace each matrix by a result. All processes of the cuts must call this.

        Args:
            compute: Called with a stack of whole matrices, which it replaces by the results, and their ``kind``.

        Raises:
            RuntimeError: A process has ended, or has not joined within the group's timeout.
        """
        for batches in self._groups:
            going = [batch.steps(compute) for batch in batches]
            for turn in range(len(going) + 2):
                # One batch leaves, then the one before it is computed, then the one before that returns.
                for steps in reversed(going[max(0, turn - 2) : turn + 1]):
                    next(steps, None)


def _batches(parts: Sequence[MatrixPart]) -> list[_Batch]:
    """Return the batches of the matrices of one group."""
    alike: dict[Hashable, list[MatrixPart]] = {}
    for part in parts:
        cut = part.cut and (part.cut.dim, part.cut.sizes)
        key = (part.rows, part.columns, cut, part.dtype, part.here.device, part.kind)
        alike.setdefault(key, []).append(part)
    loads = [0] * (1 if parts[0].cut is None else len(parts[0].cut.sizes))
    found: list[_Batch] = []
    # Large matrices first, so that small ones balance the load.
    for members in sorted(alike.values(), key=lambda members: -_work(members[0])):
        work = _work(members[0])
        count = len(loads) * max(1, _OWNED_NUMEL // (members[0].rows * members[0].columns))
        for begin in range(0, len(members), count):
            batch = members[begin : begin + count]
            found.append(_Batch(batch, [_owner(loads, work) for _ in batch]))
    return found


def _work(part: MatrixPart) -> int:
    """Return the number of multiplications of a product of a matrix with its transpose."""
    return part.rows * part.columns * min(part.rows, part.columns)


def _owner(load: list[int], work: int) -> int:
    owner = load.index(min(load))
    load[owner] += work
    return owner


class _Batch:
    """Matrices of equal shape that are divided alike, and their owners."""

    def __init__(self, parts: Sequence[MatrixPart], owners: Sequence[int]) -> None:
        """Make a batch. ``owners`` are ranks in the group of the cut, one for each part; all 0 without a cut."""
        first = parts[0]
        self._cut, self._dtype, self._kind = first.cut, first.dtype, first.kind
        self._size = (first.rows, first.columns)
        ordered = sorted(range(len(parts)), key=owners.__getitem__)
        self._parts = [parts[i].here for i in ordered]
        if first.cut is None:
            return
        rank = dist.get_rank(first.cut.group)
        counts = [owners.count(owner) for owner in range(len(first.cut.sizes))]
        self._owned = counts[rank]
        across = self._size[1 - first.cut.dim]
        self._sent = [count * first.cut.sizes[rank] * across for count in counts]
        self._received = [self._owned * size * across for size in first.cut.sizes]

    def steps(self, compute: Compute) -> Iterator[None]:
        """Send parts to owners, compute and send results back, and copy the results: one stage at each ``next``."""
        cut = self._cut
        if cut is None:
            yield
            stack = torch.stack(self._parts).to(self._dtype)
            compute(stack, self._kind)
            torch._foreach_copy_(self._parts, list(stack.unbind()))
            return
        # The group communicates on the device of its mesh, not on a CPU that parameters are offloaded to.
        flat = torch.cat([part.reshape(-1) for part in self._parts]).to(cut.device_type, self._dtype)
        owned, work = _send(flat, self._sent, self._received, cut.group)
        yield
        _wait(work, cut.group)
        stack = owned.new_empty(self._owned, *self._size)
        of_each = stack.split_with_sizes(list(cut.sizes), 1 + cut.dim)
        pieces = [p.view(v.shape) for p, v in zip(owned.split_with_sizes(self._received), of_each, strict=True)]
        torch._foreach_copy_(of_each, pieces)
        if self._owned:
            compute(stack, self._kind)
        torch._foreach_copy_(pieces, of_each)
        flat, work = _send(owned, self._received, self._sent, cut.group)
        yield
        _wait(work, cut.group)
        results = flat.split_with_sizes([part.numel() for part in self._parts])
        torch._foreach_copy_(self._parts, [r.view(p.shape) for r, p in zip(results, self._parts, strict=True)])


_WHAT = "exchange parts of matrices"


def _send(flat: Tensor, sent: list[int], received: list[int], group: Any) -> tuple[Tensor, Any]:
    """Send ``sent[r]`` elements of ``flat`` to each rank r; return the received elements, and the work to wait for."""
    coming = flat.new_empty(sum(received))
    with naming_failure(group, _WHAT):
        return coming, dist.all_to_all_single(coming, flat, received, sent, group=group, async_op=True)


def _wait(work: Any, group: Any) -> None:
    with naming_failure(group, _WHAT):
        work.wait()
