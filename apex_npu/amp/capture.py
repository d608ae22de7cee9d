# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Blocks and steps in the capture of a CUDA graph: what the host decides, or moves, no replay would."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from apex_npu.amp.optimizer_record import OptimizerRecord, record_of
from apex_npu.amp.scaler import LossScaler
from apex_npu.backends import is_capturing


def check_block(optimizers: Sequence[Optimizer], scaler: LossScaler, *, delays: bool) -> None:
    """Require a ``scale_loss`` that a replay can repeat, of ``optimizers``; a graph is being captured.

    Raises:
        RuntimeError: It could not be repeated.
    """
    records = [record for optimizer in optimizers if (record := record_of(optimizer)) is not None]
    if scaler.dynamic:
        raise _refusal(
            "with a dynamic loss scale: behind each backward the host decides whether the step is to be skipped. Use a "
            "static one (loss_scale=128.0, or O4 and O5, which need none)"
        )
    if delays:
        raise _refusal(
            "with delay_unscale or delay_overflow_check: the host remembers what is left to do. Leave them out"
        )
    if any(record.parallel is not None for record in records):
        raise _refusal(
            "with combine_ddp=True: the host waits for the averages. Use DistributedDataParallel, as torch's notes on "
            "CUDA graphs describe"
        )
    for optimizer in optimizers:
        _check_optimizer(optimizer)


def check_step(optimizer: Optimizer, record: OptimizerRecord) -> None:
    """Require that block and step are captured together.

    Raises:
        RuntimeError: One of them is not, or as of ``check_block``.
    """
    if is_capturing():
        _check_optimizer(optimizer)
        decided = record.verdict is not None and record.policy.loss_scale == "dynamic"
        if decided or record.open_check is not None:
            raise _refusal(
                "behind a block outside of the capture, with a dynamic loss scale: each replay would be skipped, or "
                "not, by what that one block has found"
            )
        record.captured_block = False
    elif record.captured_block:
        raise RuntimeError(
            "amp.scale_loss was captured in a CUDA graph without the step() that belongs to it: what a replay leaves "
            "to be done, the host does not know. Capture both in one graph, or neither (instead forward and backward "
            "alone, with torch.cuda.make_graphed_callables). Nothing has been updated"
        )


def _check_optimizer(optimizer: Optimizer) -> None:
    if not getattr(optimizer, "capturable", False):
        raise _refusal(
            f"with {type(optimizer).__name__}, which is not capturable: use one of apex_npu.optimizers with "
            "capturable=True"
        )
    record = record_of(optimizer)
    if record is not None and record.pairs and not record.has_flat_model(optimizer.fused_groups()):  # type: ignore[attr-defined]
        raise _refusal(
            "before a step like it has been taken: parameters of the model are about to move. Take some outside first"
        )


def _refusal(reason: str) -> RuntimeError:
    return RuntimeError(
        f"amp's blocks and steps cannot be captured in a CUDA graph {reason}; or capture forward and backward alone "
        "(torch.cuda.make_graphed_callables). Nothing has been done"
    )
