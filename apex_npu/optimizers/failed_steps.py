# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps that fail while they update: what they may have written, and what they say."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from apex_npu.fusion import Run
from apex_npu.fusion.flat_buffer import NoRoomError

logger = logging.getLogger("apex_npu")

# torch_npu's words for an error after which its task queue runs nothing any more, and does not say so again.
_QUEUE_ENDED = "The process exits for this inner error"


def end_failed_step(optimizer: str, runs: Sequence[Run], begun: int, updated: int, error: BaseException) -> None:
    """Count the step no longer for runs that it has not reached.

    Args:
        optimizer: The class's name.
        runs: All that were to be updated, and are counted.
        begun: How many updates have begun.
        updated: How many of these have ended.
        error: What has ended the last.

    Raises:
        Exception: As ``half_updated`` gives it, where that run may have been written in part.
    """
    interrupted = not isinstance(error, Exception)
    try:
        # Python handles an interrupt when a kernel has returned, most likely: that run has been stepped.
        for run in runs[begun if interrupted else updated :]:
            run.undo_count()
    finally:
        if begun and may_have_written(error, updated):
            raise half_updated(optimizer, error) from error
        if interrupted and begun and updated < len(runs):
            logger.error("%s", half_updated(optimizer, error))


def may_have_written(error: BaseException, updated: int) -> bool:
    """Whether ``error``, after ``updated`` runs, may have ended the update of a run that was being written.

    What is wrong with hyper-parameters or operands is said, by other types, before; and so is a lack of buffers.
    """
    before_writing = updated == 0 and isinstance(error, NoRoomError)
    failed = isinstance(error, (RuntimeError, MemoryError)) and not isinstance(error, NotImplementedError)
    return failed and not before_writing


def half_updated(optimizer: str, error: BaseException) -> Exception:
    """What a step of ``optimizer`` raises for ``error`` that has ended an update: of its kind, and with the way out."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
    way_out = "Load the model and the optimizer from a checkpoint before the next one"
    if _QUEUE_ENDED in str(error):
        way_out = "torch_npu's task queue has ended and computes nothing: start a new process, from a checkpoint"
    return kind(
        f"{optimizer}.step() has failed while it updated parameters: some may have been stepped, or their state, and "
        f"others not, so this step cannot be repeated. {way_out}. ({type(error).__name__}: {error})"
    )
