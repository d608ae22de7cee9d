# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How many times each slot of a group has been stepped: float32 numbers, which torch.optim shows as ``step``.

On the host they cost nothing. In a captured CUDA graph, which counts at each replay without the host, they must lie on
the device, and the host only knows which of them are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from apex_npu.fusion.flat_buffer import FlatBuffer


class StepCounts(Protocol):
    """One count for each slot, 0 at first. What it says is what a user who wrote to a ``view`` has made of it."""

    def view(self, index: int) -> Tensor:
        """The count of one slot: float32, 0-dim."""
        ...

    def set(self, index: int, count: float) -> None:
        """Set it."""
        ...

    def is_new(self, index: int) -> bool:
        """True for a slot that has never been stepped."""
        ...

    def labels(self) -> list[Hashable]:
        """One for each slot; equal ones are those of slots with equal counts."""
        ...

    def set_apart(self, stepping: Sequence[bool]) -> None:
        """From now on these slots are stepped, and others not: those of either kind have other labels behind it."""
        ...

    def uniform(self, runs: Sequence[tuple[int, int]]) -> bool:
        """True where surely each of ``runs``, first and last slot, still has one count."""
        ...

    def of_run(self, first: int) -> int | Tensor:
        """The count of a run that begins with ``first``: on a device a 0-dim tensor."""
        ...

    def add(self, first: int, last: int, addend: float | Tensor) -> None:
        """Add to the counts of a run; then comes ``settle``."""
        ...

    def settle(self) -> None:
        """What has been added was no user's writing."""
        ...


def step_counts(count: int, device: torch.device, *, capturable: bool) -> StepCounts:
    """Zeros for ``count`` slots of a group on ``device``; there, if they are ``capturable`` and it is not the CPU."""
    return _DeviceSteps(count, device) if capturable and device.type != "cpu" else _HostSteps(count)


class _HostSteps:
    """Counts that steps look up and raise on the host."""

    def __init__(self, count: int) -> None:
        self._buffer = FlatBuffer(count, torch.float32, torch.device("cpu"))
        self._counts = self._buffer.flat.numpy()  # the same memory; numpy is quicker with a handful of numbers

    def view(self, index: int) -> Tensor:
        return self._buffer.view(index, (), ())

    def set(self, index: int, count: float) -> None:
        self._counts[index] = count

    def is_new(self, index: int) -> bool:
        return int(self._counts[index]) == 0

    def labels(self) -> list[Hashable]:
        counts: list[Hashable] = self._counts.tolist()
        return counts

    def set_apart(self, stepping: Sequence[bool]) -> None:
        """Nothing to do: counts that differ are labels that do."""

    def uniform(self, runs: Sequence[tuple[int, int]]) -> bool:
        return all((counts == counts[0]).all() for counts in (self._counts[first : last + 1] for first, last in runs))

    def of_run(self, first: int) -> int:
        return int(self._counts[first])

    def add(self, first: int, last: int, addend: float | Tensor) -> None:
        self._counts[first : last + 1] += float(addend)

    def settle(self) -> None:
        """Nothing to do: counts are looked at, not their versions."""


class _DeviceSteps:
    """Counts on a device. They are read when they have been set, or written by a user, and no step waits for them else.

    A replay counts what its capture has counted, as often as it likes: so two slots may come to have equal counts
    without anybody's notice, but only those that have always been stepped together are surely equal.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._buffer = FlatBuffer(count, torch.float32, device)
        self._views: dict[int, Tensor] = {}
        self._labels: list[Hashable] = [0.0] * count
        self._new = [True] * count
        self._written = False
        self._versions = 0

    def view(self, index: int) -> Tensor:
        view = self._views.get(index)
        if view is None:
            view = self._views[index] = self._buffer.view(index, (), ())
            self._versions += view._version
        return view

    def set(self, index: int, count: float) -> None:
        self._buffer.flat[index] = count
        self._written = True

    def is_new(self, index: int) -> bool:
        self._read_again()
        return self._new[index]

    def labels(self) -> list[Hashable]:
        self._read_again()
        return list(self._labels)

    def set_apart(self, stepping: Sequence[bool]) -> None:
        labels = self.labels()
        staying = {label for label, steps in zip(labels, stepping, strict=True) if not steps}
        fresh = {label: object() for label in staying}
        self._labels = [
            fresh[label] if steps and label in staying else label for label, steps in zip(labels, stepping, strict=True)
        ]

    def uniform(self, runs: Sequence[tuple[int, int]]) -> bool:
        return not self._is_written()

    def of_run(self, first: int) -> Tensor:
        return self._buffer.flat[first]

    def add(self, first: int, last: int, addend: float | Tensor) -> None:
        self._buffer.flat[first : last + 1].add_(addend)
        self._new[first : last + 1] = [False] * (last + 1 - first)

    def settle(self) -> None:
        self._versions = self._version()  # in pure torch views count what is written to the buffer, too

    def _is_written(self) -> bool:
        return self._written or self._version() != self._versions

    def _version(self) -> int:
        return sum(view._version for view in self._views.values())

    def _read_again(self) -> None:
        if not self._is_written():
            return
        counts: list[float] = self._buffer.flat.tolist()
        self._labels, self._new = list(counts), [count == 0 for count in counts]
        self._written = False
        self._versions = self._version()
