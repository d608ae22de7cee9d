# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One ``scale_loss`` block, as the processes that train together go through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from apex_npu.amp.block import AnyBlock, Block, DelayingBlock, SaturatingBlock, WrappedBlock
from apex_npu.amp.data_parallel import DataParallel, GradSync, LocalGrads, Reduction, agree_on_overflow
from apex_npu.amp.optimizer_state import Stage
from apex_npu.amp.session import require
from apex_npu.backends import for_device
from apex_npu.backends._torch_private import disable_dynamo
from apex_npu.distributed.torch_ddp import LocalBackward


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


class SyncedBlock(WrappedBlock):
    """``block``, where other processes average its gradients, or decide together whether they have overflowed."""

    _block: Block | SaturatingBlock

    def __init__(self, block: Block | SaturatingBlock, inner: Block, groups: Sequence[Any]) -> None:
        """Nothing has been sent yet.

        Args:
            block: What is done around backward without other processes.
            inner: The same, or what that wraps.
            groups: Process groups that decide together, whether or not they average.
        """
        super().__init__(block)
        self._inner = inner
        self._agreeing = list(groups)
        prepared = [state.sync for state in inner.states if state.sync is not None]
        self._parallel: DataParallel | None = prepared[0].parallel if prepared else None
        pairs = zip(inner.states, inner.optimizers, strict=True)
        self._averaged = [(state, optimizer) for state, optimizer in pairs if state.averages]
        self._syncs: list[GradSync] = [state.sync for state, _ in self._averaged]
        self._reduction: Reduction | None = None
        self._local_after: LocalGrads | None = None

    @disable_dynamo
    def begin(self) -> None:
        self._join()
        self._block.begin()

    def _join(self) -> None:
        """Have the gradients of the backward that follows averaged, while it runs."""
        parallel, inner = self._parallel, self._inner
        if parallel is None:
            return
        if self._averaged:
            self._reduce(parallel, inner)
        all_averages = len(self._averaged) == len(inner.states)
        late = self._reduction is None or self._reduction.masters
        # Averages are the same everywhere, and so is what is found in them; the rest is each process's own.
        if late or not all_averages or any(for_device(group.device).saturates() for group in inner.groups):
            self._agreeing.insert(0, parallel.group)

    def _reduce(self, parallel: DataParallel, inner: Block) -> None:
        """Begin to average, or note what is to be averaged later."""
        states = [state for state, _ in self._averaged]
        optimizers = [optimizer for _, optimizer in self._averaged]
        former = max(sync.local_grads for sync in self._syncs)
        with_masters = any(state.masters.masters for state in states)
        if require("amp.scale_loss").no_sync_depth > 0:
            local = LocalGrads.IN_MASTERS if with_masters and inner.copies_grads else LocalGrads.IN_SOURCES
            self._local_after = max(former, local)
            # What is trained now takes part in the average that follows, though it be frozen by then.
            in_masters = self._local_after is LocalGrads.IN_MASTERS
            parallel.plan(states, optimizers, inner.groups, masters=in_masters)
        elif former is LocalGrads.IN_MASTERS and not inner.copies_grads:
            self._local_after = former  # averaged when they have all reached the masters
        else:
            self._local_after = LocalGrads.NONE
            in_masters = former is LocalGrads.IN_MASTERS
            self._reduction = parallel.begin(states, optimizers, inner.groups, masters=in_masters)

    @disable_dynamo
    def end(self) -> None:
        inner = self._inner
        inner.ending = True
        if self._reduction is not None and not self._reduction.masters:
            self._finish_reduction()
        if self._reduction is None:
            self._note()
        found_inf = self._block.unscale()
        if self._reduction is not None and inner.copies_grads:
            self._finish_reduction()
            self._note()
        if inner.decides and inner.dynamic:
            found_inf = self._agree(found_inf)
        self._block.decide(found_inf)

    def _finish_reduction(self) -> None:
        assert self._reduction is not None
        self._reduction.finish(self._inner.groups, self.scale, dynamic=self._inner.dynamic)
        self._reduction = None

    def _note(self) -> None:
        if self._local_after is not None:
            for sync in self._syncs:
                sync.local_grads = self._local_after

    def _agree(self, found_inf: bool) -> bool:
        """Whether a gradient has overflowed here or elsewhere."""
        for group in self._agreeing:
            found_inf = agree_on_overflow(found_inf, self.scale, group, self._device())
        return found_inf

    @disable_dynamo
    def abandon(self, error: BaseException) -> None:
        """See ``Block``. Other processes are notified that this one is about to raise ``error``."""
        if self._inner.ending or self._fail(error):
            self._inner.drop_all()  # some are averages by now and some are not
        else:
            self._block.abandon(error)

    def _fail(self, error: BaseException) -> bool:
        if self._reduction is not None:
            self._reduction.abandon(error, self.scale, dynamic=self._inner.dynamic)
            return True
        if self._inner.decides and self._inner.dynamic and isinstance(error, Exception):
            with suppress(RuntimeError):  # the others are gone: what matters is ``error``
                for group in self._agreeing:
                    agree_on_overflow(True, self.scale, group, self._device(), failed=True)
        return bool(self._syncs)

    def _device(self) -> torch.device:
        groups = self._inner.groups
        return groups[0].device if groups else torch.device("cpu")


class NoSyncBlock(WrappedBlock):
    """``block``, where DistributedDataParallel may keep the gradients to this process, as in its ``no_sync``.

    If it does, masters do not get them, and nothing is decided about the step, until a block has averages: those of one
    process would part the masters, or the loss scales, of all.
    """

    def __init__(self, block: AnyBlock, inner: DelayingBlock, ddps: Sequence[Any]) -> None:
        """Of ``ddps``, around models of this block; ``block`` wraps ``inner``, or is it."""
        super().__init__(block)
        self._inner, self._ddps = inner, ddps

    @disable_dynamo
    def begin(self) -> None:
        pending = any(state.stage in (Stage.DELAYED, Stage.LOCAL) for state in self._inner.states)
        self._block.begin()
        self._backward = LocalBackward(self._ddps, pending=pending)

    @disable_dynamo
    def end(self) -> None:
        if self._backward.kept_grads():
            self._inner.leave_to_averages()
        self._block.end()
