# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Detects when backward has accumulated gradients into parameters, and which buckets are full therefore.

The C++ extension counts without taking Python's lock for each gradient, which takes longer in Python than many a small
gradient takes to compute; pure torch does the same with one hook on each parameter.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from apex_npu._extension import extension


class GradArrivals(Protocol):
    """The gradients of some tensors, as they come in a backward."""

    @property
    def order(self) -> list[int]:
        """The tensors, by number, in the order in which their gradients came; again for each time."""
        ...

    @property
    def counts(self) -> list[int]:
        """How often the gradient of each has come."""
        ...

    @property
    def late(self) -> int:
        """The last tensor whose gradient came after its bucket was reported as full; -1: none."""
        ...

    def plan(self, bucket_of: Sequence[int], expected: Sequence[int]) -> None:
        """The bucket of each tensor, and how often its gradient comes; holds from the next ``begin`` on."""
        ...

    def begin(self, deferred: bool) -> None:
        """Count from 0. ``deferred``: report no bucket as full, and thus no gradient as late."""
        ...

    def end(self) -> None:
        """What comes from now on does not count."""
        ...

    def close(self) -> None:
        """Leave the tensors alone from now on."""
        ...


def grad_arrivals(tensors: Sequence[Tensor], on_full: Callable[[int], None]) -> GradArrivals:
    """Watch ``tensors``, once ``plan`` and ``begin`` have been called.

    Args:
        tensors: Those that are no leaves, or not trained when ``begin`` is called, are passed over.
        on_full: Called with n when the first n buckets are full: in order, whatever order gradients have. Two threads
            may call at once. It must not keep what counts alive.
    """
    if extension is not None:
        counting: GradArrivals = extension.GradArrivals(list(tensors), on_full)
        return counting
    return PythonGradArrivals(tensors, on_full)


class PythonGradArrivals:
    """See ``GradArrivals``; csrc/data_parallel is the same in C++."""

    def __init__(self, tensors: Sequence[Tensor], on_full: Callable[[int], None]) -> None:
        self._tensors = list(tensors)
        self._on_full = on_full
        self._lock = threading.Lock()  # devices have threads of their own in backward
        self._hooks: dict[int, Any] = {}
        self._armed = self._deferred = False
        self._bucket_of: list[int] = []
        self._expected: list[int] = []
        self._awaited: list[int] = []
        self._full = 0
        self.order: list[int] = []
        self.counts = [0] * len(self._tensors)
        self.late = -1

    def plan(self, bucket_of: Sequence[int], expected: Sequence[int]) -> None:
        """See ``GradArrivals``."""
        self._bucket_of, self._expected = list(bucket_of), list(expected)

    def begin(self, deferred: bool) -> None:
        """See ``GradArrivals``."""
        for i, tensor in enumerate(self._tensors):
            if i not in self._hooks and tensor.requires_grad and tensor.is_leaf:
                self._hooks[i] = tensor.register_post_accumulate_grad_hook(self._hook(i))
        self._awaited = [0] * (max(self._bucket_of, default=-1) + 1)
        for bucket in self._bucket_of:
            self._awaited[bucket] += 1
        self.counts = [0] * len(self._tensors)
        self.order = []
        self._full, self.late = 0, -1
        self._deferred, self._armed = deferred, True

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        found = weakref.ref(self)  # a parameter may outlive what counts here

        def hook(tensor: Tensor) -> None:
            arrivals = found()
            if arrivals is not None and arrivals._armed:
                arrivals._arrived(index)

        return hook

    def _arrived(self, index: int) -> None:
        with self._lock:
            bucket = self._bucket_of[index]
            self.counts[index] += 1
            self.order.append(index)
            if bucket < self._full:
                self.late = index
                return
            grad = self._tensors[index].grad
            if grad is not None and grad.requires_grad:
                self._deferred = True  # create_graph=True: gradients are needed as they are until the block ends
            if self.counts[index] == self._expected[index]:
                self._awaited[bucket] -= 1
            before = self._full
            while not self._deferred and self._full < len(self._awaited) and not self._awaited[self._full]:
                self._full += 1
            full = self._full
        if full != before:
            self._on_full(full)

    def end(self) -> None:
        """See ``GradArrivals``."""
        self._armed = False

    def close(self) -> None:
        """See ``GradArrivals``."""
        self.end()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
