# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Errors of steps that fail during an update."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from apex_npu.backends.failed_updates import half_updated
from apex_npu.fusion import Run
from apex_npu.fusion.flat_buffer import NoRoomError

logger = logging.getLogger("apex_npu")


def end_failed_step(optimizer: str, runs: Sequence[Run], begun: int, updated: int, error: BaseException) -> None:
    """Undo the count of the step for runs that have not been updated.

    Args:
        optimizer: The name of the optimizer's class.
        runs: All runs of the step; each has counted it.
        begun: The number of updates that have begun.
        updated: The number of updates that have ended.
        error: The error that has ended the last update.

    Raises:
        Exception: The error of ``half_updated``, if the last run may have been written in part.
    """
    interrupted = not isinstance(error, Exception)
    # Wrong hyper-parameters or operands raise errors of other types, before any write, and so does a failed allocation
    # of buffers. The others may have interrupted writes to the next run.
    before_writing = isinstance(error, NotImplementedError) or (updated == 0 and isinstance(error, NoRoomError))
    may_have_written = isinstance(error, (RuntimeError, MemoryError)) and not before_writing
    try:
        # Python most likely handles an interrupt after a kernel has returned, when that run has been stepped.
        for run in runs[begun if interrupted else updated :]:
            run.undo_count()
    finally:
        if begun and may_have_written:
            raise half_updated(optimizer, error) from error
        if interrupted and begun and updated < len(runs):
            logger.error("%s", half_updated(optimizer, error))
