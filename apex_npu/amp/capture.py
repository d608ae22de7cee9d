# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks of blocks and steps in the capture of a CUDA graph, whose replays do not repeat what the host does."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from apex_npu.amp.masters import fused_groups
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage, state_of
from apex_npu.amp.scaler import LossScaler
from apex_npu.backends import is_capturing


def check_block(optimizers: Sequence[Optimizer], scaler: LossScaler, *, delays: bool) -> None:
    """Raise, while a graph is being captured, if a replay cannot repeat the ``scale_loss`` of ``optimizers``."""
    states = [state for optimizer in optimizers if (state := state_of(optimizer)) is not None]
    if scaler.dynamic:
        raise _refusal(
            "with a dynamic loss scale: after each backward the host decides whether the step is to be skipped. Use a "
            "static one (loss_scale=128.0, or O4 and O5, which need none)"
        )
    if delays:
        raise _refusal(
            "with delay_unscale or delay_overflow_check, or in DistributedDataParallel.no_sync(): the host remembers "
            "what is left to do. Leave them out"
        )
    if any(state.parallel is not None for state in states):
        raise _refusal(
            "with combine_ddp=True: the host waits for the averages. Use DistributedDataParallel, as torch's notes on "
            "CUDA graphs describe"
        )
    for optimizer in optimizers:
        _check_optimizer(optimizer, state_of(optimizer))


def check_step(optimizer: Optimizer, state: AmpOptimizerState) -> None:
    """Raise if only one of block and step is captured, or a replay cannot repeat the step."""
    if is_capturing():
        _check_optimizer(optimizer, state)
        decided = state.decision is not None and state.policy.loss_scale == "dynamic"
        if decided or (state.pending is not None and state.pending.check is not None):
            raise _refusal(
                "after a block outside of the capture, with a dynamic loss scale: the overflow check of that block "
                "would decide about all replays"
            )
    elif state.stage is Stage.CAPTURED:
        raise RuntimeError(
            "amp.scale_loss was captured in a CUDA graph without its step(): the host does not know the gradients that "
            "a replay leaves. Capture both in one graph, or forward and backward alone, with "
            "torch.cuda.make_graphed_callables. Nothing has been updated"
        )


def _check_optimizer(optimizer: Optimizer, state: AmpOptimizerState | None) -> None:
    if not getattr(optimizer, "capturable", False):
        raise _refusal(
            f"with {type(optimizer).__name__}, which is not capturable: use one of apex_npu.optimizers with "
            "capturable=True"
        )
    if state is not None and state.masters.params() and not state.masters.has_flat_model(fused_groups(optimizer)):
        raise _refusal(
            "before the same step has run outside of it: the first step moves parameters. Run some steps outside first"
        )


def _refusal(reason: str) -> RuntimeError:
    return RuntimeError(
        f"amp's blocks and steps cannot be captured in a CUDA graph {reason}; or capture forward and backward alone "
        "(torch.cuda.make_graphed_callables). Nothing has been done"
    )
