# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One ``scale_loss`` block, as the processes that train together go through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.optim import Optimizer

from apex_npu.amp.block import Block, BlockPart, DelayingBlock
from apex_npu.amp.data_parallel import DataParallel, GradSync, LocalGrads, Reduction, agree_on_overflow
from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.master_grads import MasterGradGroup
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.session import require
from apex_npu.backends import for_device
from apex_npu.distributed.torch_ddp import LocalBackward, rebuild_buckets


@contextmanager
def no_sync() -> Iterator[None]:
    """A context whose ``scale_loss`` blocks keep gradients to this process, under ``combine_ddp=True``.

    For accumulation: open it around all blocks but the last of a step. Gradients are averaged by the first block
    outside of it, all that have been added up since. A ``step()`` before that is refused. As with torch's
    DistributedDataParallel, all processes must do the same. Without combine_ddp nothing happens.

    Raises:
        RuntimeError: amp has not been initialized; or this was opened inside of a ``scale_loss`` block.

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
            "amp.no_sync was opened inside of an amp.scale_loss block, which may have sent gradients already; open it "
            "around the whole block"
        )
    session.no_sync_depth += 1
    try:
        yield
    finally:
        session.no_sync_depth -= 1


class Agreement(BlockPart):
    """Other processes average the gradients of a block, or decide together whether they have overflowed."""

    def __init__(
        self,
        states: Sequence[AmpOptimizerState],
        optimizers: Sequence[Optimizer],
        groups: Sequence[tuple[Any, str | None]],
    ) -> None:
        """Nothing has been sent yet.

        Args:
            states: Those of the block.
            optimizers: The block's.
            groups: Process groups that decide together, whether or not they average, and the type of device that each
                talks on; None: that of the gradients.
        """
        self._agreeing = list(groups)
        prepared = [state.sync for state in states if state.sync is not None]
        self._parallel: DataParallel | None = prepared[0].parallel if prepared else None
        pairs = zip(states, optimizers, strict=True)
        self._averaged = [(state, optimizer) for state, optimizer in pairs if state.averages]
        self._syncs: list[GradSync] = [state.sync for state, _ in self._averaged]
        self._reduction: Reduction | None = None
        self._local_after: LocalGrads | None = None

    def before_begin(self, block: Block) -> None:
        """Have the gradients of the backward that follows averaged, while it runs."""
        parallel = self._parallel
        if parallel is None:
            return
        if self._averaged:
            self._reduce(parallel, block)
        all_averages = len(self._averaged) == len(block.states)
        late = self._reduction is None or self._reduction.masters
        # Averages are the same everywhere, and so is what is found in them; the rest is each process's own.
        if late or not all_averages or any(for_device(group.device).saturates() for group in block.groups):
            self._agreeing.insert(0, (parallel.group, None))

    def _reduce(self, parallel: DataParallel, block: Block) -> None:
        """Begin to average, or note what is to be averaged later."""
        states = [state for state, _ in self._averaged]
        optimizers = [optimizer for _, optimizer in self._averaged]
        former = max(sync.local_grads for sync in self._syncs)
        with_masters = any(state.masters.masters for state in states)
        if require("amp.scale_loss").no_sync_depth > 0:
            local = LocalGrads.IN_MASTERS if with_masters and block.copies_grads else LocalGrads.IN_SOURCES
            self._local_after = max(former, local)
            # What is trained now takes part in the average that follows, though it be frozen by then.
            in_masters = self._local_after is LocalGrads.IN_MASTERS
            parallel.plan(states, optimizers, block.groups, masters=in_masters)
        elif former is LocalGrads.IN_MASTERS and not block.copies_grads:
            self._local_after = former  # averaged when they have all reached the masters
        else:
            self._local_after = LocalGrads.NONE
            in_masters = former is LocalGrads.IN_MASTERS
            self._reduction = parallel.begin(states, optimizers, block.groups, masters=in_masters)

    def before_unscale(self, block: Block) -> None:
        if self._reduction is not None and not self._reduction.masters:
            self._finish_reduction(block)
        if self._reduction is None:
            self._note()

    def after_unscale(self, block: Block, found_inf: bool) -> bool:
        if self._reduction is not None and block.copies_grads:
            self._finish_reduction(block)
            self._note()
        if block.decides and block.dynamic:
            for group, device_type in self._agreeing:
                found_inf = agree_on_overflow(found_inf, block.scale, group, _device(block, device_type))
        return found_inf

    def _finish_reduction(self, block: Block) -> None:
        assert self._reduction is not None
        self._reduction.finish(block.groups, block.scale, dynamic=block.dynamic)
        self._reduction = None

    def _note(self) -> None:
        if self._local_after is not None:
            for sync in self._syncs:
                sync.local_grads = self._local_after

    def drops(self, block: Block, error: BaseException) -> bool:
        """Notify other processes that this one is about to raise ``error``."""
        if self._reduction is not None:
            self._reduction.abandon(error, block.scale, dynamic=block.dynamic)
            return True
        if block.decides and block.dynamic and isinstance(error, Exception):
            with suppress(RuntimeError):  # the others are gone: what matters is ``error``
                for group, device_type in self._agreeing:
                    agree_on_overflow(True, block.scale, group, _device(block, device_type), failed=True)
        return bool(self._syncs)


def _device(block: Block, device_type: str | None) -> torch.device:
    if device_type is not None and all(group.device.type != device_type for group in block.groups):
        return torch.device(device_type)  # not the CPU that parameters are offloaded to
    return block.groups[0].device if block.groups else torch.device("cpu")


class BucketViews(BlockPart):
    """DistributedDataParallel leaves gradients in its buckets (``gradient_as_bucket_view``), which it writes again."""

    def __init__(self, ddps: Sequence[Any], groups: Sequence[GradGroup]) -> None:
        """``ddps``: around models of the block, whose gradients are in ``groups``."""
        self._ddps = ddps
        self._copying = [group for group in groups if isinstance(group, MasterGradGroup)]

    def begun(self, block: Block) -> None:
        for group in self._copying:
            group.begin_in_buckets()

    def before_unscale(self, block: Block) -> None:
        self._rebuild()
        for group in self._copying:
            group.end_in_buckets()

    def drops(self, block: Block, error: BaseException) -> bool:
        if isinstance(error, Exception):
            self._rebuild()
        for group in self._copying:
            group.copied.restore_put_aside(ended=False)
        return False

    def _rebuild(self) -> None:
        for ddp in self._ddps:
            rebuild_buckets(ddp)


class UnknownAverages(BlockPart):
    """DistributedDataParallel may keep the gradients of a block to this process, as in its ``no_sync``.

    If it does, masters do not get them, and nothing is decided about the step, until a block has averages: those of one
    process would part the masters, or the loss scales, of all.
    """

    def __init__(self, ddps: Sequence[Any]) -> None:
        """``ddps``: around models of the block, which is a ``DelayingBlock``."""
        self._ddps = ddps

    def begun(self, block: Block) -> None:
        self._backward = LocalBackward(self._ddps, pending=bool(block.waited))

    def before_unscale(self, block: Block) -> None:
        if self._backward.kept_grads():
            assert isinstance(block, DelayingBlock)
            block.leave_to_averages()
