# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One scale_loss block, as the processes that train together go through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.optim import Optimizer

from apex_npu.amp.data_parallel import DataParallel, LocalGrads, Reduction, agree_on_overflow
from apex_npu.amp.gradients import GradUnit
from apex_npu.amp.session import require
from apex_npu.backends import for_device


@contextmanager
def no_sync() -> Iterator[None]:
    """A context whose ``scale_loss`` blocks keep gradients to this process, under ``combine_ddp=True``.

    For accumulation: open it around all blocks but the last of a step. Gradients are averaged by the first block
    outside of it, all that have been added up since. A ``step()`` before that is refused. As with torch's
    DistributedDataParallel, all processes must do the same. Without combine_ddp nothing happens.

    Raises:
        RuntimeError: amp has not been initialized; or this was opened inside of a ``scale_loss`` block.
    """
    session = require("amp.no_sync")
    if any(o._amp_record.in_block for o in session.adopted):
        raise RuntimeError(
            "amp.no_sync was opened inside of an amp.scale_loss block, which may have sent gradients already; open it "
            "around the whole block"
        )
    session.no_sync_depth += 1
    try:
        yield
    finally:
        session.no_sync_depth -= 1


class BlockOfRanks:
    """What a block does together with other processes; by itself nothing.

    Attributes:
        agreeing: The groups that have to agree on whether a gradient has overflowed.
    """

    def __init__(self, records: Sequence[Any], units: list[GradUnit], *, decides: bool) -> None:
        """``records`` of its optimizers; ``decides``: whether the next step is skipped follows from this block."""
        self._records, self._units, self._decides = records, units, decides
        self._reduction: Reduction | None = None
        self._local_after: LocalGrads | None = None
        self._parallel = False
        self.agreeing: list[Any] = []

    @property
    def is_alone(self) -> bool:
        """No other process takes part."""
        return not self._parallel and not self.agreeing

    def join(self, parallel: DataParallel, optimizers: Sequence[Optimizer], *, local: bool, delivers: bool) -> None:
        """Average the gradients over processes.

        Args:
            parallel: How.
            optimizers: Whose.
            local: Not in this block: another one will average what has added up.
            delivers: They reach masters in this block.
        """
        self._parallel = True
        former = max(record.local_grads for record in self._records)
        with_masters = any(record.pairs for record in self._records)
        if local:
            self._local_after = LocalGrads.IN_MASTERS if with_masters and delivers else LocalGrads.IN_SOURCES
            self._local_after = max(former, self._local_after)
            # What is trained now takes part in the average that follows, though it be frozen by then.
            parallel.plan(self._records, optimizers, self._units, masters=self._local_after is LocalGrads.IN_MASTERS)
        elif former is LocalGrads.IN_MASTERS and not delivers:
            # Averaged when they have all reached the masters.
            self._local_after = former
        else:
            self._local_after = LocalGrads.NONE
            self._reduction = parallel.begin(
                self._records, optimizers, self._units, masters=former is LocalGrads.IN_MASTERS
            )
        late = self._reduction is None or self._reduction.masters
        # Averages are the same everywhere, and so is what is found in them; other flags are each process's own.
        if late or any(for_device(unit.device).saturates() for unit in self._units):
            self.agreeing.insert(0, parallel.group)

    def average_sources(self, scale: float, *, dynamic: bool) -> None:
        """Behind backward: wait for the averages."""
        if self._reduction is not None and not self._reduction.masters:
            self._reduction.finish(self._units, scale, dynamic=dynamic)
            self._reduction = None
        if self._reduction is None:
            self._note()

    def average_masters(self, scale: float, *, dynamic: bool) -> None:
        """Behind unscaling: average what the masters have gathered without other processes."""
        if self._reduction is not None:
            self._reduction.finish(self._units, scale, dynamic=dynamic)
            self._reduction = None
            self._note()

    def _note(self) -> None:
        if self._local_after is not None:
            for record in self._records:
                record.local_grads = self._local_after

    def agree(self, found_inf: bool, scale: float) -> bool:
        """Whether a gradient has overflowed here or elsewhere."""
        for group in self.agreeing if self._decides else []:
            found_inf = agree_on_overflow(found_inf, scale, group, self._device())
        return found_inf

    def fail(self, error: BaseException, scale: float, *, dynamic: bool) -> bool:
        """Tell the other processes that this one is about to raise ``error``.

        Returns:
            True where gradients are of no use any more.
        """
        if self._reduction is not None:
            self._reduction.abandon(error, scale, dynamic=dynamic)
            return True
        if self._decides and isinstance(error, Exception):
            with suppress(RuntimeError):  # the others are gone: what matters is ``error``
                for group in self.agreeing:
                    agree_on_overflow(True, scale, group, self._device(), failed=True)
        return self._parallel

    def _device(self) -> torch.device:
        return self._units[0].device if self._units else torch.device("cpu")
