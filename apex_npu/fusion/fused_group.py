# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``FusedGroup``: the buffers of an optimizer's parameters of one device and dtype, and their runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from apex_npu.fusion.flat_grads import FlatGrads, check_combinable
from apex_npu.fusion.graph_runs import GraphRuns
from apex_npu.fusion.group_buffers import GroupBuffers
from apex_npu.fusion.run import Runs, StepCounts


class HasFusedGroups:
    """The base class of fused optimizers. amp recognizes fused optimizers by it.

    Attributes:
        state_formats: The formats of the states, see ``StateFormats`` of the optimizers.
    """

    state_formats: Any

    def flat_grads(self) -> list[FlatGrads]:
        """Return the gradient buffers of all parameters. Fuses parameters that are not fused yet."""
        raise NotImplementedError

    def fused_groups(self) -> list[FusedGroup]:
        """Return the groups of the last step."""
        raise NotImplementedError

    def combined_groups(self) -> list[FusedGroup]:
        """Return one group for each combined buffer. Makes the buffers if they do not exist."""
        raise NotImplementedError

    def combined_grads(self) -> list[FlatGrads]:
        """Return the gradients of each of ``combined_groups``."""
        return [fused.grads for fused in self.combined_groups() if isinstance(fused.grads, FlatGrads)]

    def leading_params(self) -> Sequence[Tensor]:
        """Return the parameters whose combined buffers come before all others: amp's 16-bit ones."""
        return ()

    def check_combining(self) -> None:
        """Require that combined buffers may be made now.

        Raises:
            RuntimeError: Combined buffers may not be made; nothing has moved.
        """
        check_combinable()

    def moving_params(self) -> AbstractContextManager[None]:
        """Return the context for code that moves parameters to other addresses outside of a step."""
        return nullcontext()


class FusedGroup(GroupBuffers):
    """The buffers of some parameters, and their runs.

    Attributes:
        runs: The runs: which slots step together.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        param_flat: Tensor,
        offsets: Sequence[int],
        runs: Runs,
    ) -> None:
        """Wrap ``param_flat``, into which ``fuse`` has moved ``params``, as ``GroupBuffers`` does. Store ``runs``."""
        super().__init__(params, param_flat, offsets)
        self.runs = runs
        if isinstance(self.grads, FlatGrads) and isinstance(runs, GraphRuns):
            # A graph replays the addresses of its capture, so gradients must stay at their addresses.
            self.grads.gathers_all, self.grads.memory.lends = True, False

    def set_step(self, index: int, step: float) -> None:
        """Set the step count of one parameter."""
        self.runs.counts.set(index, step)
        self.runs.forget()
        if step != 0:
            self.use(index)


def new_runs(count: int, device: torch.device, *, capturable: bool) -> Runs:
    """Return the runs of a new group of ``count`` slots. Allocates the memory of the step counts."""
    on_device = capturable and device.type != "cpu"
    return GraphRuns(count, device) if on_device else Runs(StepCounts(count))


def flat_over(param: Tensor) -> Tensor:
    """Return the memory of ``param`` as a 1-D tensor."""
    return param.detach().as_strided((param.numel(),), (1,), param.storage_offset())
