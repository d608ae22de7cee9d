# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a ``scale_loss`` block that several processes run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from apex_npu.amp.block import Block, BlockPart
from apex_npu.amp.data_parallel import DataParallel, agree_on_overflow, buffer_finder
from apex_npu.amp.optimizer_state import Stage
from apex_npu.amp.session import require
from apex_npu.distributed.grad_reducer import GradReducer
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

    def __init__(self, block: Block, groups: Sequence[tuple[Any, str | None]]) -> None:
        """Make the part of ``block``; nothing is sent yet.

        Args:
            block: The block.
            groups: Process groups that decide together about overflow, each with the device type on which it
                communicates; None: that of the gradients.
        """
        self._agreeing = list(groups)
        self._parallel = next((state.parallel for state in block.states if state.parallel is not None), None)
        self._averaged = [state for state in block.states if state.averages]
        self._averaging: tuple[DataParallel, GradReducer] | None = None
        self._local_after = bool(self._averaged) and block.session.no_sync_depth > 0

    def before_begin(self, block: Block) -> None:
        """Begin to average the gradients of the backward that follows, while it runs."""
        parallel = self._parallel
        if parallel is None:
            return
        if self._averaged:
            averaged = [o for o, state in zip(block.optimizers, block.states, strict=True) if state.averages]
            # In no_sync, too: parameters trained now take part in the next average, even if they are frozen before it.
            reducer = parallel.fit(self._averaged, averaged, block.groups)
            if reducer is not None and not self._local_after:
                reducer.begin(buffer_finder(block.groups))
                self._averaging = parallel, reducer
        all_averages = len(self._averaged) == len(block.states)
        # Averages, and so their overflows, are equal on all processes. Other gradients, and saturation flags, are not.
        if self._averaging is None or not all_averages or any(state.grads.saturates for state in block.states):
            self._agreeing.insert(0, (parallel.options.group, None))

    def before_unscale(self, block: Block) -> None:
        if self._averaging is not None:
            parallel, reducer = self._averaging
            parallel.finish(reducer, block.scale, dynamic=block.dynamic)
            self._averaging = None
        for state in self._averaged:
            state.has_local_grads = self._local_after

    def after_unscale(self, block: Block, found_inf: bool) -> bool:
        if self._exchanges(block):
            for group, device_type in self._agreeing:
                found_inf = agree_on_overflow(found_inf, block.scale, group, _device(block, device_type))
        return found_inf

    def drops(self, block: Block, error: BaseException) -> bool:
        """Notify other processes that this one is about to raise ``error``."""
        if self._averaging is not None:
            parallel, reducer = self._averaging
            parallel.abandon(reducer, error, block.scale, dynamic=block.dynamic)
            return True
        if self._exchanges(block) and isinstance(error, Exception):
            with suppress(RuntimeError):  # the other processes have ended: ``error`` matters more
                for group, device_type in self._agreeing:
                    agree_on_overflow(True, block.scale, group, _device(block, device_type), failed=True)
        return bool(self._averaged)

    def _exchanges(self, block: Block) -> bool:
        """Return whether processes communicate at the end: to decide, or to report an error inside ``no_sync``."""
        return block.dynamic and (block.decides or self._local_after)


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
        pending = any(stage in (Stage.DELAYED, Stage.LOCAL) for stage in block.before.values())
        self._backward = LocalBackward(self._ddps, pending=pending)

    def before_unscale(self, block: Block) -> None:
        if not self._backward.kept_grads():
            return
        if any(state.widens for state in block.states):
            block.set_delay("delay_unscale")
        elif block.unscales and block.dynamic:
            block.set_delay("no_sync")
