# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs that a CUDA graph can step. The step counts are on the device, since replays count without the host.

The host only records which counts are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from apex_npu.backends.script_warnings import warn
from apex_npu.fusion.flat_buffer import FlatBuffer
from apex_npu.fusion.grad_slots import ELSEWHERE, IN_BUFFER, NONE
from apex_npu.fusion.group_buffers import GroupBuffers
from apex_npu.fusion.run import Run, Runs, StepCounts


class GraphRuns(Runs):
    """Runs with step counts on a device, which captured graphs step as well."""

    def __init__(self, count: int, device: torch.device) -> None:
        """Make runs for ``count`` slots that have not been stepped."""
        super().__init__(_DeviceStepCounts(count, device))
        self._captured: list[Run] = []
        self._has_warned = False

    @property
    def is_captured(self) -> bool:  # type: ignore[override]
        """True if a CUDA graph steps some of the runs."""
        return bool(self._captured)

    def steps_as_before(self, group: GroupBuffers) -> bool:
        """Return True if ``cut`` would return the runs of its last call for the gradients as they are now."""
        states = group.grads.states().replace(bytes([ELSEWHERE]), bytes([IN_BUFFER]))
        return not states.strip(bytes([NONE])) or (states == self._states and not self.counts.is_written())

    def keep(self) -> None:
        """Keep the tables of the current runs alive: replays of the graph that is being captured read them."""
        for run in self.current:
            run.keep()
        self._captured += [run for run in self.current if run not in self._captured]
        self._has_warned = False

    def _cut(self, group: GroupBuffers, states: bytes) -> list[Run]:
        """Cut the runs, and warn if this splits a captured run, whose graph counts steps for the whole run."""
        stepping = [state != NONE for state in states]
        parted = [run for run in self._captured if 0 < sum(map(stepping.__getitem__, run.slots)) < len(run.params)]
        if parted and not self._has_warned:
            self._has_warned = True
            warn(
                "some parameters that a captured CUDA graph steps together have no gradient now. Do not replay that "
                "graph any more, since it assumes that their step counts are equal; capture a new one"
            )
        return super()._cut(group, states)


class _DeviceStepCounts(StepCounts):
    """Step counts on a device. So that steps do not wait, the host reads them only after they were set or written.

    Each replay repeats the counting of its capture without the host, so the host may not know that two slots have equal
    counts. It assumes equal counts only for slots that have always been stepped together.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._buffer = FlatBuffer(count, torch.float32, device)
        self._views: dict[int, Tensor] = {}
        self._labels: list[Hashable] = [0.0] * count
        self._new = [True] * count
        self._written = False
        self._versions = 0
        self.added = None

    def view(self, index: int) -> Tensor:
        view = self._views.get(index)
        if view is None:
            view = self._views[index] = self._buffer.view(index, (), ())
            self._versions += view._version
        return view

    def renew_views(self) -> None:
        self._views, self._versions = {}, 0

    def set(self, index: int, count: float) -> None:
        self._buffer.flat[index] = count
        self._written = True

    def is_new(self, index: int) -> bool:
        self._read_again()
        return self._new[index]

    def labels(self, stepping: Sequence[bool]) -> list[Hashable]:
        self._read_again()
        staying = {label for label, steps in zip(self._labels, stepping, strict=True) if not steps}
        fresh: dict[Hashable, Hashable] = {label: object() for label in staying}
        self._labels = [
            fresh[label] if steps and label in staying else label
            for label, steps in zip(self._labels, stepping, strict=True)
        ]
        return list(self._labels)

    def add(self, runs: Runs, addend: float | Tensor) -> None:
        for stretch in runs.stretches:
            if isinstance(addend, Tensor) or addend:
                self._buffer.flat[stretch].add_(addend)
            self._new[stretch] = [False] * (stretch.stop - stretch.start)
        self.added = addend
        self._versions = self._version()  # without the extension, versions of views also count writes to the buffer
        for run in runs.current:
            run.step = self._buffer.flat[run.slots.start]

    def undo(self, slots: range) -> None:
        if self.added is not None:
            self._buffer.flat[slots.start : slots.stop].sub_(self.added)
            self._written = True  # the counts have to be read again: some slots may never have been stepped

    def is_written(self) -> bool:
        return self._written or self._version() != self._versions

    def _version(self) -> int:
        return sum(view._version for view in self._views.values())

    def _read_again(self) -> None:
        if not self.is_written():
            return
        counts: list[float] = self._buffer.flat.tolist()
        self._labels, self._new = list(counts), [count == 0 for count in counts]
        self._written = False
        self._versions = self._version()
