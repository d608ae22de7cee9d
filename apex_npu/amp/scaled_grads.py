# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Detects unscaled gradients that are added to those that ``fuse_unscale`` leaves multiplied by the loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.amp.grad_groups import GradGroup
from apex_npu.fusion import WriteTable
from apex_npu.fusion.grad_slots import IN_BUFFER
from apex_npu.fusion.shards import local_part

# A block or a step emits this warning once for each optimizer.
NOT_SCALED = (
    "gradients have been added to, written or replaced after amp.scale_loss, which with fuse_unscale=True leaves them "
    "multiplied by the loss scale until step: a backward outside of amp.scale_loss adds gradients without that factor, "
    "which then have almost no weight. Run it in a scale_loss block, or call optimizer.zero_grad() before it, or leave "
    "fuse_unscale out. Ignore this warning if the gradients were only multiplied"
)


class ScaledGrads:
    """The gradients of parameters as they were when a block ended."""

    def __init__(self, groups: Sequence[GradGroup]) -> None:
        """Note the gradients of ``groups``."""
        self._parts = [(group, group.params, WriteTable()) for group in groups]
        for _, params, table in self._parts:
            table.note_grads(params)

    def are_written(self) -> bool:
        """Return True if gradients have been replaced or written, other than by gathering or clearing them."""
        nonzero: dict[torch.device, list[Tensor]] = {}
        for group, params, table in self._parts:
            written, moved = table.changed_grads(params)
            if moved and group.flat is not None:
                states = group.flat.states()
                moved = [k for k in moved if states[k] != IN_BUFFER]
            for k in written + moved:
                grad = params[k].grad
                assert grad is not None
                if grad.layout != torch.strided:
                    return True
                nonzero.setdefault(grad.device, []).append(local_part(grad).any())
        # One result for each device: reading each gradient's result would wait for the device each time.
        return any(bool(torch.stack(answers).any()) for answers in nonzero.values())
