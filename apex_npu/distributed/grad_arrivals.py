# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Detects when backward has accumulated gradients into parameters, and which buckets are full therefore.

The C++ extension (csrc/data_parallel) counts without taking Python's lock for each gradient, which takes longer in
Python than many a small gradient takes to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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
    counting: GradArrivals = extension.GradArrivals(list(tensors), on_full)
    return counting
