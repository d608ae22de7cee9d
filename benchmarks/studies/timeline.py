# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Records one combine_ddp step: when gradients came, buckets were full, sent and averaged, and when backward ended.

Only looks: hooks on parameters, and ``torch.distributed.all_reduce`` for as long as it records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from apex_npu.distributed.grad_reducer import GradReducer

Span = tuple[float, float]


@dataclass
class Transfer:
    """One all-reduce; times in seconds from the start of backward.

    Attributes:
        nbytes: What each process sends and gets back.
        sent: When it was started.
        averaged: When it was complete.
        full: When the last gradient of its bucket came; None for the exchange after the last bucket.
    """

    nbytes: int
    sent: float
    averaged: float = 0.0
    full: float | None = None


@dataclass
class Timeline:
    """One step of this process.

    Attributes:
        transfers: In the order in which they were sent.
        gradients: When each came, and how many bytes it has.
        backward: When backward ended.
        end: When the averages were there.
    """

    transfers: list[Transfer] = field(default_factory=list)
    gradients: list[tuple[float, int]] = field(default_factory=list)
    backward: float = 0.0
    end: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Of the time in which anything was on its way, the part before backward ended."""
        busy = merged([(t.sent, t.averaged) for t in self.transfers])
        return length([(a, min(b, self.backward)) for a, b in busy if a < self.backward]) / length(busy)


def merged(spans: Sequence[Span]) -> list[Span]:
    """The same time, in spans that do not overlap."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def length(spans: Sequence[Span]) -> float:
    """Seconds in ``spans``, which do not overlap."""
    return sum(end - begin for begin, end in spans)


@contextmanager
def _watching(reducer: GradReducer, timeline: Timeline, clock: Callable[[], float]) -> Iterator[dict[int, float]]:
    came: dict[int, float] = {}
    works: list[Any] = []

    def hook(index: int) -> Callable[[Tensor], None]:
        def note(param: Tensor) -> None:
            came[index] = clock()
            timeline.gradients.append((came[index], param.numel() * param.element_size()))

        return note

    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: object, **kwargs: object) -> Any:
        transfer = Transfer(tensor.numel() * tensor.element_size(), clock())
        timeline.transfers.append(transfer)
        work = original(tensor, *args, **kwargs)
        works.append(work)  # what it calls when it is done must not outlive it

        def done(_: object) -> None:
            transfer.averaged = clock()

        work.get_future().add_done_callback(done)
        return work

    hooks = [t.register_post_accumulate_grad_hook(hook(i)) for i, t in enumerate(reducer.tensors) if t.requires_grad]
    dist.all_reduce = all_reduce
    try:
        yield came
    finally:
        dist.all_reduce = original
        for handle in hooks:
            handle.remove()


def record(reducer: GradReducer, backward: Callable[[], None], finish: Callable[[], None]) -> Timeline:
    """One step, whose forward has been done.

    Args:
        reducer: That of the model.
        backward: Computes gradients.
        finish: Waits for their averages.
    """
    timeline = Timeline()
    start = time.perf_counter()
    with _watching(reducer, timeline, lambda: time.perf_counter() - start) as came:
        backward()
        timeline.backward = time.perf_counter() - start
        finish()
        timeline.end = time.perf_counter() - start
    for transfer in timeline.transfers:
        transfer.averaged = transfer.averaged or timeline.end  # waited for, but not told of yet
    for transfer, members in zip(timeline.transfers, reducer.bucket_members, strict=False):
        transfer.full = max((came[i] for i in members if i in came), default=None)
    return timeline
