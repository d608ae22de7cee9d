# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``profile``: reports where the time of a step goes, as a table and as a trace."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from apex_npu.backends._torch_private import torch_profiler
from apex_npu.debug.profiling.labels import profiler_ranges
from apex_npu.debug.profiling.phases import BEFORE_FORWARD, ELSEWHERE, OperatorTime, Phase, Steps, events_of, summarize
from apex_npu.debug.text import aligned, count
from apex_npu.distributed.rank_progress import LastRank

_SHOWN = 10
# No advice is given for a smaller share of a step, in percent.
_LITTLE = 5.0


class profile:
    """A context that records some training steps, and reports where their time goes.

    ``print(p)`` has a line for each phase of a step. It shows the time on the host, its share, and the numbers of
    operator calls, of copies between the host and a device, and of waits of the host for a device. On a GPU it also
    shows the number of kernels and their time. The most expensive operators and a line of advice follow. The results of
    a step do not change. Run a few steps before, as the first ones allocate memory.

    Args:
        steps: The number of steps to record; later steps run as without this context.
        trace: A folder for the trace, which chrome://tracing, Perfetto, TensorBoard and HolisticTraceAnalysis read;
            None writes no trace.

    Attributes:
        phases: The phases, in the order in which they begin, with ``name``, ``ms``, ``share``, ``operators``,
            ``copies``, ``waits``, ``kernels`` and ``device_ms``, each per step on average.
        operators: The operators, the most expensive first, with ``name``, ``ms`` and ``calls``.
        idle: The share of the time in which the device computes nothing, in percent; None if no device was recorded.
        advice: The most useful change.

    Raises:
        ValueError: ``steps`` is not a positive integer.
        OSError: ``trace`` is a file, or the folder cannot be created.
        RuntimeError: A profiler is on already.

    Example::

        >>> batches = [torch.randn(8, 4)] * 5
        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> with amp.debug.profile(steps=3) as p:
        ...     for batch in batches:
        ...         with amp.scale_loss(model(batch).square().mean(), optimizer) as scaled_loss:
        ...             scaled_loss.backward()
        ...         optimizer.step()
        ...         p.step()
        >>> [phase.name for phase in p.phases if phase.share > 100]
        []
    """

    def __init__(self, steps: int = 3, trace: str | os.PathLike[str] | None = None) -> None:
        """Check the arguments."""
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps must be a positive integer, got {steps!r}")
        self._steps = steps
        self._folder = None if trace is None else os.fspath(trace)
        if self._folder is not None:
            try:
                os.makedirs(self._folder, exist_ok=True)
            except OSError as error:
                raise type(error)(f"trace must be a folder, or the path of a new one: {error}") from error
        self._done, self._rank = 0, LastRank()
        self._profiler: Any = None
        self._ranges = ExitStack()
        self._keep(Steps(0, 0.0))

    def _keep(self, found: Steps) -> None:
        self._found = found
        self.phases: list[Phase] = found.phases
        self.operators: list[OperatorTime] = found.operators
        self.idle: float | None = found.idle
        self.advice = advice_of(found)

    def __enter__(self) -> profile:
        if torch_profiler._is_profiler_enabled:
            raise RuntimeError(
                "amp.debug.profile was entered while another profiler is on, and torch runs one at a time: leave "
                "the other one first, or use its traces, which have the ranges of amp, too"
            )
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # steps have run before
            schedule = torch.profiler.schedule(wait=0, warmup=0, active=self._steps, repeat=1)
        self._done, self._rank = 0, LastRank()
        profiler = torch.profiler.profile(activities=activities, schedule=schedule, record_shapes=True, acc_events=True)
        profiler.start()
        self._profiler = profiler
        self._ranges.enter_context(profiler_ranges())
        return self

    def step(self) -> None:
        """Mark the end of a step; call it after ``optimizer.step()``, once in each iteration."""
        if self._profiler is not None:
            self._rank.update()
            self._done += 1
            if self._done < self._steps:
                self._profiler.step()
            else:
                self._end()

    def __exit__(self, *raised: object) -> None:
        self._end()

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        with self._ranges:
            profiler.stop()
        # The part after the last full step does not count as a step, unless there is nothing else.
        self._keep(summarize(*events_of(profiler), complete=self._done or None))
        if self._folder is not None:
            write = torch.profiler.tensorboard_trace_handler(self._folder, worker_name=f"rank{self._rank.rank}")
            write(profiler)

    def __str__(self) -> str:
        found, on_device = self._found, self.idle is not None
        if not found.count:
            return "nothing was recorded yet"
        heads = ["phase", "ms", "share", "operators", "copies", "waits", *(["kernels", "device ms"] * on_device)]
        total = replace(found.phase(""), name="all", ms=found.ms, share=100.0)
        lines = [f"{count(found.count, 'step')} of {found.ms:.3g} ms; the values are averages of one step", ""]
        lines += aligned([heads, *(_cells(phase, on_device) for phase in (*self.phases, total))])
        lines += ["", "copies: between the host and a device; waits: of the host for a device"]
        if on_device:
            lines.append(f"the device computes nothing for {self.idle:.1f} % of the time")
        lines += ["", "the most expensive operators, each without those that it calls"]
        rows = [[one.name, f"{one.ms:.3f}", _number(one.calls)] for one in self.operators[:_SHOWN]]
        return "\n".join([*lines, *aligned([["operator", "ms", "calls"], *rows]), "", f"advice: {self.advice}"])


def _cells(phase: Phase, on_device: bool) -> list[str]:
    cells = [phase.name, f"{phase.ms:.3f}", f"{phase.share:.1f} %"]
    cells += [_number(value) for value in (phase.operators, phase.copies, phase.waits)]
    return cells + ([_number(phase.kernels), f"{phase.device_ms:.3f}"] if on_device else [])


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def advice_of(found: Steps) -> str:
    """Return the advice that can save the largest share of a step."""
    step, before = found.phase("Optimizer.step#"), found.phase(BEFORE_FORWARD)
    rest = found.phase(ELSEWHERE)
    elsewhere = [p for p in found.phases if p.name != "amp.wait" and p.waits]
    waits_ms = sum(p.waits_ms for p in elsewhere)
    per_step = 100.0 / found.ms if found.ms else 0.0
    options = {
        f"{before.share:.0f} % of a step is spent before forwards begin, mostly on data loading: more num_workers, "
        "pin_memory and non_blocking copies, or a smaller transform": before.share,
        f"{rest.share:.0f} % of a step is elsewhere, in no phase of amp: the loss function, metrics, logging, "
        "saving, a scheduler, data that is loaded after the last forward, or a model that amp does not know. Put "
        "ranges of torch.profiler.record_function around these to see in the trace which one it is": rest.share,
    }
    if step.operators > 30:  # a fused step is one operator, plus a few for each further buffer
        fused = "a fused optimizer of apex_npu.optimizers calls one for each buffer"
        options[f"{step.operators:.0f} operators in Optimizer.step: {fused}"] = step.share
    if elsewhere:
        most = max(elsewhere, key=lambda p: p.waits_ms)
        options[
            f"{_number(sum(p.waits for p in elsewhere))} waits for the device besides amp's own, most of the time in "
            f"{most.name}: .item(), print, a boolean mask, or a copy without non_blocking=True from pinned memory"
        ] = waits_ms * per_step
    if found.idle is not None:
        options[
            f"the device computes nothing for {found.idle:.0f} % of the time: a larger batch, torch.compile, or fewer "
            "operators where the table has many"
        ] = found.idle
    text = max(options, key=lambda text: options[text])
    if options[text] >= _LITTLE:
        return text
    largest = max(found.phases, key=lambda p: p.share, default=Phase("nothing"))
    return f"nothing stands out; {largest.name} takes {largest.share:.0f} % of a step"
