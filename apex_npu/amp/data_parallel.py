# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""combine_ddp: the part of scale_loss that averages gradients over processes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.widened_grads import WidenedGrads
from apex_npu.backends import numbers_on
from apex_npu.backends._torch_private import disable_dynamo, labelled
from apex_npu.distributed.consistency import RanksDifferError, all_reduce, failing_together
from apex_npu.distributed.grad_reducer import FindFlat, GradReducer, ReduceOptions
from apex_npu.distributed.rank_progress import RankProgress
from apex_npu.fusion import FlatGrads, are_same

logger = logging.getLogger(__name__)


@dataclass
class _Fitted:
    """A reducer, and the gradient groups and tensors it was made for; ``units`` is None before the first block."""

    units: list[GradGroup] | None = None
    reducer: GradReducer | None = None
    tensors: list[Tensor] = field(default_factory=list)


class DataParallel:
    """The setup of ``amp.initialize(combine_ddp=True)``: the processes that average gradients, and how.

    Attributes:
        options: The options of the reduction, including the processes.
        progress: The progress of the processes.
    """

    def __init__(self, options: ReduceOptions) -> None:
        """Store ``options``. The first block of each list of optimizers makes its reducer."""
        self.options = options
        self.progress = RankProgress(options.group)
        self._fitted: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], _Fitted]] = weakref.WeakKeyDictionary()
        self._agreed_scale: float | None = None

    @property
    def reducers(self) -> list[GradReducer]:
        """The reducers, one for each list of optimizers that has had a block."""
        fitted = [fitted for known in self._fitted.values() for fitted in known.values()]
        return [one.reducer for one in fitted if one.reducer is not None]

    def fit(self, states: Sequence[Any], optimizers: Sequence[Optimizer], units: list[GradGroup]) -> GradReducer | None:
        """Return the reducer of these gradients, which it averages in this block or a later one.

        Args:
            states: amp's state of each optimizer.
            optimizers: The optimizers of the block.
            units: The gradient groups of the optimizers.

        Returns:
            The reducer; None if nothing is trained.
        """
        fitted = self._fitted.setdefault(states[0], {}).setdefault(tuple(map(id, states)), _Fitted())
        if fitted.units is not None and are_same(fitted.units, units):
            return fitted.reducer
        groups = _groups(optimizers, {id(t) for t in fitted.tensors})
        tensors = [t for group in groups for t in group]
        if fitted.units is None or not are_same(fitted.tensors, tensors):
            self._compare(tensors, len(groups))
            if fitted.reducer is not None:
                fitted.reducer.close()
            fitted.reducer = GradReducer(groups, self.options, self.progress) if tensors else None
            fitted.tensors = tensors
        fitted.units = units
        return fitted.reducer

    def _compare(self, tensors: Sequence[Tensor], group_count: int) -> None:
        description = [(f"gradient {i}", f"{tuple(t.shape)}, {t.dtype}") for i, t in enumerate(tensors)]
        description.append(("the number of parameter groups with gradients", str(group_count)))
        try:
            with failing_together(self.options.group) as descriptions:
                descriptions.append(description)
        except RanksDifferError as error:
            raise RanksDifferError(
                f"{error}. Parameters that differ between processes, such as parts of a classifier, need a separate "
                "optimizer with optimizer.combine_ddp = False"
            ) from error
        except RuntimeError as error:
            raise RuntimeError(
                "the list of trainable parameters has changed on this process (parameters were unfrozen, added or "
                "replaced), but other processes have not joined the comparison of these lists; change it on all "
                f"processes. ({error})"
            ) from error

    @disable_dynamo
    def finish(self, reducer: GradReducer, scale: float, *, dynamic: bool) -> None:
        """Wait until all gradients of ``reducer`` are averages.

        Args:
            reducer: The reducer that has begun in the block.
            scale: The loss scale.
            dynamic: The scale is dynamic, so that this block waits for the device anyway.

        Raises:
            RanksDifferError: Another process has failed, or has another loss scale.
        """
        # The loss scales of other processes are also read if this one is not the last agreed one.
        read = dynamic or scale != self._agreed_scale
        report = reducer.finish(scale, read=read, others_read=dynamic)
        if report is None:
            return
        if report.failed_rank is not None:
            raise RanksDifferError(
                f"rank {report.failed_rank} of the process group has raised inside its amp.scale_loss block; its own "
                "error says why. The gradients of this block have been dropped on all ranks"
            )
        check_scales(report.smallest_scale, report.largest_scale)
        self._agreed_scale = scale

    def abandon(self, reducer: GradReducer, error: BaseException, scale: float, *, dynamic: bool) -> None:
        """End the averaging after ``error`` has ended the block.

        Processes that read the report are notified instead of blocked. Processes that do not wait for the device in
        this block must stay blocked, or they would step without this process.
        """
        listening = dynamic or reducer.everybody_reads
        if not reducer.broken:
            self.progress.note(f"raised {error!r}", now=True)
        if reducer.broken or not listening or not isinstance(error, Exception):
            reducer.cancel()
            return
        logger.error(
            "an exception has ended an amp.scale_loss block; notifying the other ranks before it propagates: %r", error
        )
        try:
            reducer.finish(scale, failed=True)
        except RuntimeError as second:
            logger.error("the other ranks could not be notified: %s", second)

    def close(self) -> None:
        """Remove all hooks."""
        for reducer in self.reducers:
            reducer.close()
        self._fitted.clear()


def _groups(optimizers: Sequence[Optimizer], planned: set[int]) -> list[list[Tensor]]:
    """Return the parameters whose gradients are reduced, by optimizer, device and dtype, in the order of their buffers.

    Planned parameters stay in the list when they are frozen, so that freezing on one process alone changes nothing.
    """
    seen: set[int] = set()
    found: list[list[Tensor]] = []
    for optimizer in optimizers:
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            if id(param) not in seen and (param.requires_grad or id(param) in planned):
                seen.add(id(param))
                alike.setdefault((param.device, param.dtype), []).append(param)
        found.extend(alike.values())
    return found


def buffer_finder(units: Sequence[GradGroup]) -> FindFlat:
    """Return a function that returns the buffer in which backward puts the gradients of given parameters, or None."""
    by_first = {id(unit.params[0]): unit.flat for unit in units if not isinstance(unit, WidenedGrads)}

    def find(tensors: Sequence[Tensor]) -> FlatGrads | None:
        flat = by_first.get(id(tensors[0]))
        return flat if flat is not None and are_same(flat.params, tensors) else None

    return find


def check_scales(smallest: float, largest: float) -> None:
    """Raise if processes have different loss scales."""
    if smallest != largest:
        raise RanksDifferError(
            f"ranks of the process group have different loss scales: {smallest} and {largest}. Load amp.state_dict() "
            "on all of them, and call amp.scale_loss equally often"
        )


@disable_dynamo
@labelled("amp.wait")
def agree_on_overflow(found_inf: bool, scale: float, group: Any, device: torch.device, *, failed: bool = False) -> bool:
    """Return whether any process of ``group`` has found inf or nan. All of them must call this.

    Args:
        found_inf: Whether this process has found inf or nan.
        scale: The loss scale of this process.
        group: A process group.
        device: The device on which the group communicates.
        failed: Whether this process is about to raise.

    Raises:
        RanksDifferError: Another process is about to raise, or has another loss scale.
    """
    failed_rank = dist.get_rank(group) + 1.0 if failed else 0.0
    said = numbers_on([float(found_inf), scale, -scale, failed_rank], torch.float32, device)
    all_reduce(said, dist.ReduceOp.MAX, group, of="overflow and loss scale")
    found, largest, smallest, failed_rank = said.tolist()
    if failed:
        return True
    if failed_rank:
        raise RanksDifferError(
            f"rank {int(failed_rank) - 1} of the process group has raised inside its amp.scale_loss block; its own "
            "error says why"
        )
    check_scales(-smallest, largest)
    return bool(found)
