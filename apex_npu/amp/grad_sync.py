# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a ``scale_loss`` block that several processes run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.block import Block, BlockPart
from apex_npu.amp.data_parallel import DataParallel, GradSync, Reduction, agree_on_overflow
from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.session import require
from apex_npu.backends import for_device
from apex_npu.distributed.torch_ddp import LocalBackward, rebuild_buckets


@contextmanager
def no_sync() -> Iterator[None]:
    """Disable the averaging of gradients by ``scale_loss`` blocks inside this context, with ``combine_ddp=True``.

    For accumulation, open it around all blocks of a step but the last. The first block outside of it averages all
    accumulated gradients. A ``step()`` before that raises. As with torch's DistributedDataParallel, all processes must
    do the same. Without combine_ddp the context does nothing.

    Raises:
        RuntimeError: amp has not been initialized, or the context is opened inside a ``scale_loss`` block.

    Example::

        >>> # combine_ddp=True, with a process group
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", combine_grad=True, combine_ddp=True)
        >>> with amp.no_sync():
        ...     with amp.scale_loss(loss_fn(model(input), target), optimizer) as scaled_loss:
        ...         scaled_loss.backward()
        >>> with amp.scale_loss(loss_fn(model(input), target), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
    """
    session = require("amp.no_sync")
    if any(o._amp_state.stage is Stage.SCALED for o in session.adopted):
        raise RuntimeError(
            "amp.no_sync was opened inside an amp.scale_loss block, which may have sent gradients already; open it "
            "around the whole block"
        )
    session.no_sync_depth += 1
    try:
        yield
    finally:
        session.no_sync_depth -= 1


class Agreement(BlockPart):
    """A block whose processes average gradients, or decide together whether gradients have overflowed."""

    def __init__(
        self,
        states: Sequence[AmpOptimizerState],
        optimizers: Sequence[Optimizer],
        groups: Sequence[tuple[Any, str | None]],
    ) -> None:
        """Make the part; nothing is sent yet.

        Args:
            states: The states of the block's optimizers.
            optimizers: The optimizers of the block.
            groups: Process groups that decide together about overflow, each with the device type on which it
                communicates; None: that of the gradients.
        """
        self._agreeing = list(groups)
        prepared = [state.sync for state in states if state.sync is not None]
        self._parallel: DataParallel | None = prepared[0].parallel if prepared else None
        pairs = zip(states, optimizers, strict=True)
        self._averaged = [(state, optimizer) for state, optimizer in pairs if state.averages]
        self._syncs: list[GradSync] = [state.sync for state, _ in self._averaged]
        self._reduction: Reduction | None = None
        self._local_after = False

    def before_begin(self, block: Block) -> None:
        """Begin to average the gradients of the backward that follows, while it runs."""
        parallel = self._parallel
        if parallel is None:
            return
        if self._averaged:
            self._reduce(parallel, block)
        all_averages = len(self._averaged) == len(block.states)
        # Averages, and so their overflows, are equal on all processes. Other gradients, and saturation flags, are not.
        if self._reduction is None or not all_averages or any(map(_saturates, block.groups)):
            self._agreeing.insert(0, (parallel.group, None))

    def _reduce(self, parallel: DataParallel, block: Block) -> None:
        """Begin to average gradients, or note those to be averaged later."""
        states = [state for state, _ in self._averaged]
        optimizers = [optimizer for _, optimizer in self._averaged]
        self._local_after = require("amp.scale_loss").no_sync_depth > 0
        if self._local_after:
            # Parameters trained now take part in the next average, even if they are frozen before it.
            parallel.plan(states, optimizers, block.groups)
        else:
            self._reduction = parallel.begin(states, optimizers, block.groups)

    def before_unscale(self, block: Block) -> None:
        if self._reduction is not None:
            self._reduction.finish(block.scale, dynamic=block.dynamic)
            self._reduction = None
        for sync in self._syncs:
            sync.has_local_grads = self._local_after

    def after_unscale(self, block: Block, found_inf: bool) -> bool:
        if self._exchanges(block):
            for group, device_type in self._agreeing:
                found_inf = agree_on_overflow(found_inf, block.scale, group, _device(block, device_type))
        return found_inf

    def drops(self, block: Block, error: BaseException) -> bool:
        """Notify other processes that this one is about to raise ``error``."""
        if self._reduction is not None:
            self._reduction.abandon(error, block.scale, dynamic=block.dynamic)
            return True
        if self._exchanges(block) and isinstance(error, Exception):
            with suppress(RuntimeError):  # the other processes have ended: ``error`` matters more
                for group, device_type in self._agreeing:
                    agree_on_overflow(True, block.scale, group, _device(block, device_type), failed=True)
        return bool(self._syncs)

    def _exchanges(self, block: Block) -> bool:
        """Return whether processes communicate at the end: to decide, or to report an error inside ``no_sync``."""
        return block.dynamic and (block.decides or self._local_after)


def _saturates(group: GradGroup) -> bool:
    return for_device(group.device).saturates()


def _device(block: Block, device_type: str | None) -> torch.device:
    if device_type is not None and all(group.device.type != device_type for group in block.groups):
        return torch.device(device_type)  # not the CPU to which parameters are offloaded
    return block.groups[0].device if block.groups else torch.device("cpu")


class BucketViews(BlockPart):
    """A block whose gradients are views of DistributedDataParallel's buckets (``gradient_as_bucket_view``)."""

    def __init__(self, ddps: Sequence[Any]) -> None:
        """Make the part. ``ddps`` are around the block's models."""
        self._ddps = ddps

    def before_unscale(self, block: Block) -> None:
        self._rebuild()

    def drops(self, block: Block, error: BaseException) -> bool:
        if isinstance(error, Exception):
            self._rebuild()
        return False

    def _rebuild(self) -> None:
        for ddp in self._ddps:
            rebuild_buckets(ddp)


class UnknownAverages(BlockPart):
    """A block whose gradients DistributedDataParallel may not average, as in its ``no_sync``.

    Without averages the block neither widens gradients (O2 and O5) nor decides about the step: gradients of one process
    would make parameters, or loss scales, differ between processes. A later block does so.
    """

    def __init__(self, ddps: Sequence[Any]) -> None:
        """Make the part. ``ddps`` are around models of the block."""
        self._ddps = ddps

    def begun(self, block: Block, scaled_loss: Tensor) -> None:
        self._backward = LocalBackward(self._ddps, pending=bool(block.waited))

    def before_unscale(self, block: Block) -> None:
        if self._backward.kept_grads():
            block.leave_to_averages()
