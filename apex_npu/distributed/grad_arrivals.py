# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Detects when backward has accumulated gradients into parameters, and which buckets are full as a result.

The C++ extension (csrc/data_parallel) counts without taking Python's lock for each gradient. Counting in Python would
take longer than computing a small gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from apex_npu._extension import extension


class GradArrivals(Protocol):
    """A counter of the gradients of some tensors as they arrive in a backward."""

    @property
    def order(self) -> list[int]:
        """The numbers of the tensors in the order in which their gradients came, once for each time."""
        ...

    @property
    def counts(self) -> list[int]:
        """The number of times that the gradient of each tensor has come."""
        ...

    @property
    def late(self) -> int:
        """The number of the last tensor whose gradient came after its bucket was reported as full, or -1."""
        ...

    def plan(self, bucket_of: Sequence[int], expected: Sequence[int]) -> None:
        """Set the bucket of each tensor, and how often its gradient comes, from the next ``begin`` on."""
        ...

    def begin(self, deferred: bool) -> None:
        """Count from 0. ``deferred``: report no bucket as full, and thus no gradient as late."""
        ...

    def end(self) -> None:
        """Stop counting."""
        ...

    def close(self) -> None:
        """Stop watching the tensors permanently."""
        ...


def grad_arrivals(tensors: Sequence[Tensor], on_full: Callable[[int], None]) -> GradArrivals:
    """Return a counter that watches ``tensors`` once its ``plan`` and ``begin`` have been called.

    Args:
        tensors: The tensors to watch. Those that are not leaves, or not trained when ``begin`` is called, are skipped.
        on_full: Called with n when the first n buckets are full, in increasing order. Two threads may call it at the
            same time. It must not keep the counter alive.
    """
    counting: GradArrivals = extension.GradArrivals(list(tensors), on_full)
    return counting
