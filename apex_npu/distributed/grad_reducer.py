# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Averages flat gradients over processes, bucket by bucket, while backward still computes the next ones.

The content and the order of the messages depend only on the list of tensors and their sizes, not on addresses.
Processes with different memory layouts therefore send equal messages.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.backends import numbers_on
from apex_npu.backends._torch_private import labelled
from apex_npu.distributed.buckets import (
    MAX_BUCKET_NBYTES,
    MIN_BUCKET_NBYTES,
    bucket_nbytes,
    order_of_completion,
    plan_buckets,
    waits_little,
)
from apex_npu.distributed.consistency import GroupReference
from apex_npu.distributed.rank_progress import RankProgress
from apex_npu.fusion.flat_grads import FlatGrads
from apex_npu.fusion.grad_slots import NONE
from apex_npu.ops import LOW_PRECISION

# Returns the buffer with the gradients of exactly these tensors, or None.
FindFlat = Callable[[Sequence[Tensor]], FlatGrads | None]


@dataclass(frozen=True)
class ReduceOptions:
    """The options of averaging gradients.

    Attributes:
        processes: The processes to average over.
        bucket_count: The requested number of buckets; the sizes below take precedence.
        low_precision_dtype: The dtype in which float16 and bfloat16 gradients are reduced; None: their own dtype.
        min_bucket_nbytes: The least size of all buckets but the last.
        max_bucket_nbytes: The size from which on a bucket is closed.
    """

    processes: GroupReference
    bucket_count: int
    low_precision_dtype: torch.dtype | None = None
    min_bucket_nbytes: int = MIN_BUCKET_NBYTES
    max_bucket_nbytes: int = MAX_BUCKET_NBYTES

    @property
    def group(self) -> Any:
        """The process group. Raises RuntimeError if it has been destroyed."""
        return self.processes()

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of ``dtype`` are reduced."""
        low = dtype in LOW_PRECISION
        return self.low_precision_dtype if low and self.low_precision_dtype is not None else dtype


@dataclass(frozen=True)
class Report:
    """A summary of the reports of all processes at the end of a reduction.

    Attributes:
        largest_scale: The largest loss scale of the processes.
        smallest_scale: The smallest loss scale of the processes.
        failed_rank: The last of the group's ranks whose backward has failed; None if all have succeeded.
    """

    largest_scale: float
    smallest_scale: float
    failed_rank: int | None


class LateGradientError(RuntimeError):
    """Raised if a gradient comes after its bucket was sent."""


def divisors(dtype: torch.dtype, size: int) -> tuple[float, float]:
    """Return the divisors of gradients before and after they are summed over ``size`` processes.

    The first is a power of two, so that dividing by it rounds only the smallest float16 numbers. For float16 it is
    about the square root of ``size``: dividing by ``size`` first would lose small gradients, and dividing only
    afterwards would overflow large sums. Other dtypes have enough range; for them it is the largest power of two, which
    can save the second division.
    """
    exponent = math.log2(size)
    before = 2.0 ** (math.ceil(exponent / 2) if dtype == torch.float16 else math.floor(exponent))
    return before, size / before


@dataclass(eq=False)
class Bucket:
    """A range of slots that is reduced by one collective; ``members`` are the reducer's numbers of their tensors."""

    row: int
    slots: range
    members: list[int]
    sent: bool = False
    absent: list[int] = field(default_factory=list)  # slots without a gradient on this process
    wire: Tensor | None = None
    work: Any = None


class GradReducer:
    """The gradients of some tensors, averaged over a process group.

    A bucket is sent when all its gradients have come, but never before the buckets that precede it. All processes
    therefore send the same buckets in the same order, independent of the order of their backward. The first reduction
    sends nothing before its end. It records the order in which gradients come, and how often. All processes then use
    rank 0's order.

    Attributes:
        tensors: The tensors whose gradients are averaged, in the given order, which is equal on all processes.
        broken: A collective has failed, so that the group cannot be used any more.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], options: ReduceOptions, progress: RankProgress) -> None:
        """Plan the buckets.

        Args:
            groups: Lists of tensors. Each list has one device and dtype, and may be in one flat buffer already.
            options: The options of the reductions.
            progress: Records the progress of this process.
        """
        self.options = options
        self._progress = progress
        self.broken = False
        self._size = dist.get_world_size(options.group)
        self._rank = dist.get_rank(options.group)
        self._lock = threading.Lock()
        self.tensors: list[Tensor] = []
        self._rows: list[list[int]] = []
        for group in groups:
            self._rows.append(list(range(len(self.tensors), len(self.tensors) + len(group))))
            self.tensors.extend(group)
        # The layouts of others' buffers that can be used; None: the row is in another order.
        self._offsets: list[list[int] | None] = [FlatGrads.apart(group).offsets for group in groups]
        self._nbytes = [t.numel() * options.wire_dtype(t.dtype).itemsize for t in self.tensors]
        self._grads: list[FlatGrads] = []
        self._own: dict[int, FlatGrads] = {}
        self._buckets: list[Bucket] = []
        self._cut()
        found = weakref.ref(self)  # a parameter may outlive its optimizer
        self._arrivals = extension.GradArrivals(self.tensors, lambda full: _send_up_to(found(), full))
        self._expected = [1] * len(self.tensors)
        self._planned = False
        self._recorded = False
        self._next = 0

    # Planning

    def _cut(self) -> None:
        target = bucket_nbytes(
            sum(self._nbytes),
            self.options.bucket_count,
            self.options.min_bucket_nbytes,
            self.options.max_bucket_nbytes,
        )
        buckets = []
        for row, members in enumerate(self._rows):
            for slots in plan_buckets([self._nbytes[i] for i in members], target):
                buckets.append(Bucket(row, slots, [members[slot] for slot in slots]))
        # Until arrivals are recorded, the last parameters are assumed to come first.
        self._set_order(sorted(buckets, key=lambda bucket: -max(bucket.members)))

    def _set_order(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._planned = False

    def _adopt_order(self, arrival: list[int]) -> None:
        """Send buckets in the order of their completion; if they would wait, lay memory out in this order."""
        by_members = [bucket.members for bucket in self._buckets]
        order = order_of_completion(by_members, arrival)
        if waits_little([by_members[b] for b in order], self._nbytes, arrival):
            self._set_order([self._buckets[b] for b in order])
            return
        for row, members in enumerate(self._rows):
            # Rows are cut from their end.
            self._rows[row] = sorted(members, key=arrival.__getitem__, reverse=True)
            self._offsets[row] = None
            self._own.pop(row, None)
        self._grads = []
        self._cut()
        by_members = [bucket.members for bucket in self._buckets]
        self._set_order([self._buckets[b] for b in order_of_completion(by_members, arrival)])

    @property
    def bucket_members(self) -> list[list[int]]:
        """The indices of the tensors in each bucket, in the order in which buckets are sent."""
        return [list(bucket.members) for bucket in self._buckets]

    def _place(self, find_flat: FindFlat) -> None:
        """Find or make the flat memory of each row."""
        self._grads = []
        for row, members in enumerate(self._rows):
            tensors = [self.tensors[i] for i in members]
            found = None if self._offsets[row] is None else find_flat(tensors)
            if found is not None and found.offsets == self._offsets[row]:
                self._own.pop(row, None)
            else:
                found = self._own.get(row)
                if found is None or found.broken():
                    found = self._own[row] = FlatGrads.apart(tensors)
            self._grads.append(found)

    # One reduction

    def begin(self, find_flat: FindFlat) -> None:
        """Begin to reduce the gradients that the next backward computes.

        Args:
            find_flat: Returns the buffer with the gradients of a list of tensors, which is used if its layout fits.
        """
        self._place(find_flat)
        for grads in self._grads:
            grads.memory.is_sent = True  # collectives are asynchronous: a script may clear gradients before they end
        if not self._planned:
            self._plan_arrivals()
        for bucket in self._buckets:
            bucket.sent, bucket.absent = False, []
            bucket.wire = bucket.work = None
        self._next = 0
        self._arrivals.begin(not self._recorded)
        self._progress.note("begun a backward")

    def _plan_arrivals(self) -> None:
        bucket_of = [0] * len(self.tensors)
        for number, bucket in enumerate(self._buckets):
            for i in bucket.members:
                bucket_of[i] = number
        self._arrivals.plan(bucket_of, self._expected)
        self._planned = True

    def send_up_to(self, count: int) -> None:
        """Send the buckets among the first ``count`` that have not been sent yet."""
        with self._lock:  # each device has a separate thread in backward
            while self._next < count:
                self._send(self._buckets[self._next])

    @torch.no_grad()
    @labelled("amp.all_reduce[{0._next}]")
    def _send(self, bucket: Bucket, *, empty: bool = False) -> None:
        grads = self._grads[bucket.row]
        part = grads.span(bucket.slots)
        wire_dtype = self.options.wire_dtype(part.dtype)
        before, _ = divisors(wire_dtype, self._size)
        same = part.dtype == wire_dtype
        # Gradients are divided while they are gathered. If they are widened, they are divided afterwards, which keeps
        # the bits that float16 would lose.
        states = bytes(len(bucket.slots)) if empty else grads.gather_times(1.0 / before if same else 1.0, bucket.slots)
        bucket.absent = [slot for slot, state in zip(bucket.slots, states, strict=True) if state == NONE]
        if bucket.absent:
            views = grads.views
            torch._foreach_zero_([views[slot] for slot in bucket.absent])
        bucket.wire = part if same else part.to(wire_dtype).mul_(1.0 / before)
        with self._breaking(self._next):
            bucket.work = dist.all_reduce(bucket.wire, group=self.options.group, async_op=True)
        bucket.sent = True
        self._next += 1

    @property
    def everybody_reads(self) -> bool:
        """True if all processes read the report of this reduction, independent of the arguments of ``finish``."""
        return not self._recorded or self.tensors[0].device.type == "cpu"

    @labelled("amp.all_reduce")
    def finish(
        self, scale: float, *, failed: bool = False, read: bool = True, others_read: bool = True
    ) -> Report | None:
        """Send the buckets that have not been sent yet, and wait for all.

        Afterwards every tensor that has a gradient on any process has the average on all processes. A missing gradient
        counts as zeros in the average. Tensors without a gradient on any process get no gradient.

        Args:
            scale: This process's loss scale, for the report.
            failed: This process's gradients are invalid; zeros are then sent for the remaining buckets.
            read: Return a report. Reading it waits for the device, and may be necessary anyway.
            others_read: All processes read the report.

        Raises:
            LateGradientError: A gradient has come after its bucket was sent. If the other processes read the report,
                it notifies them. Otherwise the reduction stays open, so that they do not step without this process.
        """
        self._arrivals.end()
        is_late = self._arrivals.late >= 0
        if is_late and not (others_read or self.everybody_reads):
            self._raise_late()
        failed = failed or is_late
        for bucket in self._buckets[self._next :]:
            self._send(bucket, empty=failed)
        used = [1.0] * len(self.tensors)
        for bucket in self._buckets:
            for slot in bucket.absent:
                used[bucket.members[slot - bucket.slots.start]] = 0.0
        device = self.tensors[0].device
        said = [scale, -scale, float(self._rank + 1 if failed else 0)]
        ledger = numbers_on(used + said, torch.float32, device)
        with self._breaking(len(self._buckets)):
            ledger_work = dist.all_reduce(ledger, op=dist.ReduceOp.MAX, group=self.options.group, async_op=True)
        for number, bucket in enumerate(self._buckets):
            with self._breaking(number):
                bucket.work.wait()
            self._receive(bucket)
        with self._breaking(len(self._buckets)):
            ledger_work.wait()
        report = None
        if read or failed or 0.0 in used or self.everybody_reads:
            # Asynchronous collectives report a failure here.
            with self._breaking(len(self._buckets)):
                heard = ledger.tolist()
            self._show_others(heard)
            largest, smallest, failed_rank = heard[len(self.tensors) :]
            report = Report(largest, -smallest, int(failed_rank) - 1 if failed_rank else None)
        for grads in self._grads:
            grads.memory.is_sent = False
        if is_late:
            self._raise_late()
        if not self._recorded and report is not None and report.failed_rank is None:
            self._share_record()
        self._progress.reductions += 1
        return report

    def _raise_late(self) -> None:
        self._expected = [max(pair) for pair in zip(self._expected, self._arrivals.counts, strict=True)]
        self._planned = False
        shape = tuple(self.tensors[self._arrivals.late].shape)
        raise LateGradientError(
            f"the gradient of a parameter of shape {shape} has changed after its bucket was sent to the other "
            "processes: backward has reached it more often than before. Call backward once in each amp.scale_loss "
            "block, on the sum of the losses, or open one block for each loss"
        )

    @torch.no_grad()
    def _receive(self, bucket: Bucket) -> None:
        assert bucket.wire is not None
        _, after = divisors(bucket.wire.dtype, self._size)
        if after != 1.0:
            bucket.wire.mul_(1.0 / after)
        part = self._grads[bucket.row].span(bucket.slots)
        if bucket.wire.dtype != part.dtype:
            part.copy_(bucket.wire)
        bucket.wire = bucket.work = None

    def _show_others(self, used: Sequence[float]) -> None:
        for bucket in self._buckets:
            grads = self._grads[bucket.row]
            views = grads.views if bucket.absent else []
            for slot in bucket.absent:
                if used[bucket.members[slot - bucket.slots.start]]:
                    grads.params[slot].grad = views[slot]

    def _share_record(self) -> None:
        """Adopt rank 0's order of arrival; all processes call this after their first reduction."""
        place = {index: n for n, index in enumerate(self._arrivals.order)}  # the place of its last arrival
        never = [i for i in reversed(range(len(self.tensors))) if i not in place]
        order = [*sorted(place, key=place.__getitem__), *never]
        shared = numbers_on(order, torch.int64, self.tensors[0].device)
        with self._breaking(len(self._buckets)):
            dist.broadcast(shared, dist.get_global_rank(self.options.group, 0), group=self.options.group)
            heard = shared.tolist()
        arrival = [0] * len(order)
        for n, index in enumerate(heard):
            arrival[index] = n
        self._expected = [max(1, count) for count in self._arrivals.counts]
        self._recorded = True
        self._adopt_order(arrival)

    @contextmanager
    def _breaking(self, number: int) -> Iterator[None]:
        """Run the collective of bucket ``number``, and add the progress of each process to an error that it raises."""
        try:
            yield
        except BaseException as error:
            self.broken = True
            if not isinstance(error, RuntimeError):
                raise
            count = len(self._buckets)
            place = f"bucket {number + 1} of {count}" if number < count else "the exchange after the last bucket"
            self._progress.note(f"failed in {place}", now=True)
            raise RuntimeError(
                f"rank {self._rank} could not average its gradients with the other processes: {place} failed in "
                f"reduction {self._progress.reductions + 1}; a process has ended, or is too late. Completed "
                f"reductions: {self._progress.tell()}. The rank with the fewest reports the cause. ({error})"
            ) from error

    def cancel(self) -> None:
        """Stop the reduction that ``begin`` has begun, without notifying other processes."""
        self._arrivals.end()

    def close(self) -> None:
        """Stop watching the tensors permanently."""
        self._arrivals.close()


def _send_up_to(reducer: GradReducer | None, count: int) -> None:
    if reducer is not None:
        reducer.send_up_to(count)
