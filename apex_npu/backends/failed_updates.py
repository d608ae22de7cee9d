# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The error of a step that has failed while it wrote parameters."""

from __future__ import annotations

import torch

# Part of torch_npu's message for an error after which its task queue silently runs no more tasks.
_QUEUE_ENDED = "The process exits for this inner error"


def has_ended_queue(error: BaseException) -> bool:
    """Return whether torch_npu computes nothing after ``error``, which any later call may raise."""
    return _QUEUE_ENDED in str(error)


def half_updated(optimizer: str, error: BaseException) -> Exception:
    """Return the exception for an ``error`` that ended an update of ``optimizer``, with its kind and the solution."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
    way_out = "Load the model and the optimizer from a checkpoint before the next one"
    if has_ended_queue(error):
        way_out = "torch_npu's task queue has ended and computes nothing: start a new process, from a checkpoint"
    return kind(
        f"{optimizer}.step() has failed while it updated parameters: it may have updated some parameters and states "
        f"and not others, so this step cannot be repeated. {way_out}. ({type(error).__name__}: {error})"
    )
