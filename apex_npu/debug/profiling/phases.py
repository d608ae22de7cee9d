# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Distributes a profiler's records of some steps over the phases of these steps."""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

STEP = "ProfilerStep#"
_CLEARING = "Optimizer.zero_grad#"
_LABELS = ("amp.", "Optimizer.step#", _CLEARING)
BEFORE_FORWARD, ELSEWHERE = "before forward", "elsewhere"
# The host waits when it reads a number from the device, or a shape that depends on device data.
_READING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"}
_INDEXING = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}


@dataclass
class Event:
    """An operator or a range that has run on the host; times are in microseconds.

    Attributes:
        outermost: Whether the event is an operator that no other operator has called.
        own: The time of the event without the events inside it.
        copies: Whether the event copies between the host and a device.
        waits: Whether the host waits for a device during the event.
    """

    name: str
    begin: float
    end: float
    thread: int = 0
    outermost: bool = False
    own: float = 0.0
    copies: bool = False
    waits: bool = False

    @property
    def is_operator(self) -> bool:
        """True if the event is an operator: its name has a namespace other than that of autograd's engine."""
        return "::" in self.name and not self.name.startswith("autograd::engine")


@dataclass
class Kernel:
    """A kernel that has run on a device, with the times of launch, begin and end in microseconds."""

    name: str
    launched: float
    begin: float
    end: float


@dataclass
class Phase:
    """A part of a step, on average.

    Attributes:
        name: The name of the range in traces, or ``"before forward"`` (the time before each forward, mostly data
            loading), or ``"elsewhere"``.
        ms: The time on the host, in milliseconds.
        share: The share of the step's time, in percent.
        operators: The number of operator calls, without those made by other operators.
        copies: The number of copies between the host and a device.
        waits: The number of times that the host has waited for a device.
        waits_ms: The time that the host has waited, in milliseconds.
        kernels: The number of kernels that were launched.
        device_ms: The time of these kernels on the device, in milliseconds.
    """

    name: str
    ms: float = 0.0
    share: float = 0.0
    operators: float = 0.0
    copies: float = 0.0
    waits: float = 0.0
    waits_ms: float = 0.0
    kernels: float = 0.0
    device_ms: float = 0.0


@dataclass
class OperatorTime:
    """The calls of an operator and its time, both per step on average; without the operators that it calls."""

    name: str
    ms: float = 0.0
    calls: float = 0.0


@dataclass
class Steps:
    """The summary of some steps.

    Attributes:
        count: The number of steps.
        ms: The time of one step, in milliseconds.
        phases: The phases, in the order in which they begin.
        operators: The operators, the most expensive first.
        idle: The share of the time in which the device computes nothing, in percent; None if no device was recorded.
    """

    count: int
    ms: float
    phases: list[Phase] = field(default_factory=list)
    operators: list[OperatorTime] = field(default_factory=list)
    idle: float | None = None

    def phase(self, name: str) -> Phase:
        """Return the sum of the phases whose names begin with ``name``; all zero if there is none."""
        total = Phase(name)
        for phase in self.phases:
            if phase.name.startswith(name):
                for key, value in vars(phase).items():
                    if key != "name":
                        setattr(total, key, getattr(total, key) + value)
        return total


def events_of(profiler: Any) -> tuple[list[Event], list[Kernel]]:
    """Return the events and kernels of a ``torch.profiler.profile`` that has ended, with ``record_shapes``."""
    results = profiler.profiler.kineto_results
    start = results.trace_start_ns()
    events: list[Event] = []
    waiting = [(node, False, False) for node in results.experimental_event_tree()]
    while waiting:
        node, in_operator, in_wait = waiting.pop()
        begin = (node.start_time_ns - start) / 1e3
        children = node.children
        event = Event(node.name, begin, begin + node.duration_time_ns / 1e3, node.start_tid)
        event.outermost = event.is_operator and not in_operator
        inner = sum(child.duration_time_ns for child in children) / 1e3
        event.own = max(0.0, event.end - begin - inner)
        event.copies, waits = _transfers(node)
        event.waits = waits and not in_wait
        events.append(event)
        waiting += [(child, in_operator or event.is_operator, in_wait or waits) for child in children]
    kernels = [
        Kernel(e.name, e.time_range.start, e.time_range.start, e.time_range.end)
        for e in profiler.events() or ()
        if e.device_type.name != "CPU" and not e.name.startswith((STEP, *_LABELS))
    ]
    unmatched: defaultdict[str, deque[Kernel]] = defaultdict(deque)
    for kernel in kernels:
        unmatched[kernel.name].append(kernel)
    for event in profiler.events() if kernels else ():  # a kernel counts where it is launched
        for launched in event.kernels:
            if unmatched[launched.name]:
                unmatched[launched.name].popleft().launched = event.time_range.start
    return events, kernels


def _transfers(node: Any) -> tuple[bool, bool]:
    """Return whether an event copies between the host and a device, and whether the host waits for a device."""
    if node.name == "cudaDeviceSynchronize":
        return False, True
    if node.name != "aten::copy_" and node.name not in _READING and node.name not in _INDEXING:
        return False, False
    inputs = node.extra_fields.inputs
    if node.name in _INDEXING:  # by a mask
        by_mask = any(child.name == "aten::nonzero" for child in node.children)
        return False, by_mask and inputs[0].device.type != "cpu"
    on_host = [given.device.type == "cpu" for given in inputs if hasattr(given, "device")]
    if node.name in _READING:
        return False, not all(on_host)
    copies = len(on_host) == 2 and on_host[0] != on_host[1]
    return copies, copies and not (inputs and inputs[-1] is True)


def summarize(events: Sequence[Event], kernels: Sequence[Kernel] = (), complete: int | None = None) -> Steps:
    """Distribute the time of steps, which are ranges ``ProfilerStep#…``, over phases; count the first ``complete``."""
    steps = sorted((e for e in events if e.name.startswith(STEP)), key=lambda e: e.begin)[:complete]
    if not steps:
        return Steps(0, 0.0)
    segments = [segment for step in steps for segment in _segments(step, events)]
    phases: dict[str, Phase] = {}
    begins = [begin for begin, _, _ in segments]
    for begin, end, name in segments:
        phases.setdefault(name, Phase(name)).ms += (end - begin) / 1e3

    def phase_at(time: float) -> Phase | None:
        i = bisect.bisect_right(begins, time) - 1
        return phases[segments[i][2]] if i >= 0 and time < segments[i][1] else None

    operators: dict[str, OperatorTime] = {}
    for event in events:
        phase = phase_at(event.begin)
        if phase is None:
            continue
        phase.operators += event.outermost
        phase.copies += event.copies
        phase.waits += event.waits
        phase.waits_ms += (event.end - event.begin) / 1e3 if event.waits else 0.0
        if event.is_operator:
            known = operators.setdefault(event.name, OperatorTime(event.name))
            known.ms += event.own / 1e3
            known.calls += 1
    for kernel in kernels:
        phase = phase_at(kernel.launched)
        if phase is not None:
            phase.kernels += 1
            phase.device_ms += (kernel.end - kernel.begin) / 1e3
    return _averaged(steps, list(phases.values()), list(operators.values()), kernels)


def _averaged(
    steps: Sequence[Event], phases: list[Phase], operators: list[OperatorTime], kernels: Sequence[Kernel]
) -> Steps:
    count, total = len(steps), sum(step.end - step.begin for step in steps) / 1e3
    for row in (*phases, *operators):
        for key, value in vars(row).items():
            if isinstance(value, (int, float)):
                setattr(row, key, value / count)
    for phase in phases:
        phase.share = 100.0 * phase.ms * count / total
    operators.sort(key=lambda operator: -operator.ms)
    idle = None
    if kernels:
        busy = sum(_busy(kernels, step.begin, step.end) for step in steps) / 1e3
        idle = 100.0 * (1.0 - busy / total)
    return Steps(count, total / count, phases, operators, idle)


def _segments(step: Event, events: Iterable[Event]) -> Iterator[tuple[float, float, str]]:
    """Divide the time of ``step`` into parts, each with the innermost range of its thread that contains it."""
    labels = [
        e
        for e in events
        if e.name.startswith(_LABELS) and e.thread == step.thread and step.begin <= e.begin and e.end <= step.end
    ]
    labels.sort(key=lambda e: (e.begin, -e.end))  # the innermost last
    # Data is loaded between forwards, before and after gradients are cleared.
    marks = [e for e in labels if not e.name.startswith(_CLEARING)]
    times = sorted({step.begin, step.end, *(time for e in labels for time in (e.begin, e.end))})
    for begin, end in pairwise(times):
        around = [e for e in labels if e.begin <= begin and end <= e.end]
        following = next((e.name for e in marks if e.begin >= end), "")
        before = BEFORE_FORWARD if following == "amp.forward" else ELSEWHERE
        yield begin, end, around[-1].name.partition("[")[0] if around else before  # all buckets are one phase


def _busy(kernels: Sequence[Kernel], begin: float, end: float) -> float:
    """Return how long at least one of ``kernels`` runs between ``begin`` and ``end``."""
    busy, now = 0.0, begin
    for kernel in sorted(kernels, key=lambda k: k.begin):
        first, last = max(kernel.begin, now), min(kernel.end, end)
        if last > first:
            busy += last - first
            now = last
    return busy
