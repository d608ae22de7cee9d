# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""combine_ddp: what scale_loss does so that all processes step with the average of their gradients."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from apex_npu._extension import disable_dynamo
from apex_npu.amp.gradients import GradUnit
from apex_npu.amp.ranks import RanksDifferError, failing_together
from apex_npu.backends import numbers_on
from apex_npu.fusion import FlatGrads, GradReducer, RankProgress, ReduceOptions, are_same
from apex_npu.fusion.grad_reducer import FindFlat, Report

logger = logging.getLogger(__name__)


class LocalGrads(IntEnum):
    """Which gradients of an optimizer are this process's own: not averaged yet."""

    NONE = 0
    # They lie where backward leaves them, so that the next reduction takes them along.
    IN_SOURCES = 1
    # They have been brought to fp32 masters, which then have to be averaged themselves.
    IN_MASTERS = 2


@dataclass
class _Fitted:
    """A reducer, and what it was made for."""

    units: list[GradUnit]
    reducer: GradReducer | None = None
    tensors: list[Tensor] = field(default_factory=list)


class DataParallel:
    """What ``amp.initialize(combine_ddp=True)`` has set up: who averages gradients with whom, and how.

    Attributes:
        options: How gradients are reduced.
        progress: How far the processes got.
    """

    def __init__(self, options: ReduceOptions) -> None:
        """Nothing is planned yet: gradients are, at the first block of their optimizers."""
        self.options = options
        self.progress = RankProgress(options.group)
        self._fitted: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], _Fitted]] = weakref.WeakKeyDictionary()
        self._agreed_scale: float | None = None

    @property
    def group(self) -> Any:
        """The processes."""
        return self.options.group

    @property
    def reducers(self) -> list[GradReducer]:
        """What averages, one for each list of optimizers that has had a block."""
        fitted = [fitted for known in self._fitted.values() for fitted in known.values()]
        return [one.reducer for one in fitted if one.reducer is not None]

    def begin(
        self, records: Sequence[Any], optimizers: Sequence[Optimizer], units: list[GradUnit], *, masters: bool
    ) -> Reduction | None:
        """Average what the backward that follows gives.

        Args:
            records: What amp knows of each optimizer.
            optimizers: Those of the block.
            units: How their gradients travel.
            masters: Average the gradients of what is stepped, when they are there, rather than those of the model.

        Returns:
            None where nothing is trained.
        """
        fitted = self._fit(records, optimizers, units, masters=masters)
        if fitted.reducer is None:
            return None
        fitted.reducer.begin(_finder(units, masters=masters))
        return Reduction(self, fitted.reducer, masters)

    def plan(
        self, records: Sequence[Any], optimizers: Sequence[Optimizer], units: list[GradUnit], *, masters: bool
    ) -> None:
        """Note which gradients a later block will average; see ``begin`` for the arguments."""
        self._fit(records, optimizers, units, masters=masters)

    def _fit(
        self, records: Sequence[Any], optimizers: Sequence[Optimizer], units: list[GradUnit], *, masters: bool
    ) -> _Fitted:
        key = (int(masters), *(id(record) for record in records))
        known = self._fitted.setdefault(records[0], {})
        fitted = known.get(key)
        if fitted is not None and are_same(fitted.units, units):
            return fitted
        before = fitted or _Fitted([])
        groups = _groups(optimizers, units, {id(t) for t in before.tensors}, masters=masters)
        tensors = [t for group in groups for t in group]
        if fitted is not None and are_same(fitted.tensors, tensors):
            fitted.units = units
            return fitted
        self._compare(tensors, len(groups))
        if before.reducer is not None:
            before.reducer.close()
        known[key] = _Fitted(units, GradReducer(groups, self.options, self.progress) if tensors else None, tensors)
        return known[key]

    def _compare(self, tensors: Sequence[Tensor], group_count: int) -> None:
        description = [(f"gradient {i}", f"{tuple(t.shape)}, {t.dtype}") for i, t in enumerate(tensors)]
        description.append(("the number of parameter groups with gradients", str(group_count)))
        try:
            with failing_together(self.group) as descriptions:
                descriptions.append(description)
        except RanksDifferError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "the list of trainable parameters is new on this process (parameters were unfrozen, added or "
                "replaced), but other processes have not come to compare theirs; change it on all of them alike. "
                f"({error})"
            ) from error

    def check(self, report: Report | None, scale: float) -> None:
        """Raise what a reduction has brought to light.

        Raises:
            RanksDifferError: Another process has failed, or has another loss scale.
        """
        if report is None:
            return
        if report.failed_rank is not None:
            raise RanksDifferError(
                f"rank {report.failed_rank} of the process group has raised inside its amp.scale_loss block; its own "
                "error says why. The gradients of this block have been dropped on all ranks"
            )
        check_scales(report.smallest_scale, report.largest_scale)
        self._agreed_scale = scale

    def must_read(self, scale: float) -> bool:
        """True where what other processes say about their loss scale may be news."""
        return scale != self._agreed_scale

    def close(self) -> None:
        """Take all hooks off."""
        for reducer in self.reducers:
            reducer.close()
        self._fitted.clear()


class Reduction:
    """The averaging of one scale_loss block's gradients.

    Attributes:
        masters: True: to be finished behind unscaling, for what is stepped; else before it.
    """

    def __init__(self, parallel: DataParallel, reducer: GradReducer, masters: bool) -> None:
        """Of a reducer that has begun."""
        self._parallel, self._reducer = parallel, reducer
        self.masters = masters

    @disable_dynamo
    def finish(self, units: Sequence[GradUnit], scale: float, *, dynamic: bool) -> None:
        """Wait until all gradients are averages.

        Args:
            units: How they go on from here.
            scale: The loss scale.
            dynamic: It moves, so that this block waits for the device anyway.

        Raises:
            RanksDifferError: Another process has failed, or has another loss scale.
        """
        read = dynamic or self._parallel.must_read(scale)
        self._parallel.check(self._reducer.finish(scale, read=read, others_read=dynamic), scale)
        for unit in units:
            unit.note_gathered(self._reducer)

    def abandon(self, error: BaseException, scale: float, *, dynamic: bool) -> None:
        """End it, since ``error`` has ended the block.

        Other processes are told, rather than left waiting, where they listen. Those that do not wait for the device in
        this block must be left waiting, or they would step without this process.
        """
        listening = dynamic or self._reducer.everybody_reads
        if not self._reducer.broken:
            self._parallel.progress.note(f"raised {error!r}", now=True)
        if self._reducer.broken or not listening or not isinstance(error, Exception):
            self._reducer.cancel()
            return
        logger.error(
            "an exception has ended an amp.scale_loss block; before it goes on, the other ranks are told: %r", error
        )
        try:
            self._reducer.finish(scale, failed=True)
        except RuntimeError as second:
            logger.error("the other ranks could not be told: %s", second)


def _groups(
    optimizers: Sequence[Optimizer], units: Sequence[GradUnit], planned: set[int], *, masters: bool
) -> list[list[Tensor]]:
    """The tensors to be reduced, by parameter group, device and dtype: as ``combine_grad`` lays them out.

    Those that are frozen stay once they were planned, so that freezing on one process alone changes nothing.
    """
    source_of = {id(p): s for unit in units for p, s in zip(unit.params, unit.sources, strict=True)}
    seen: set[int] = set()
    found: list[list[Tensor]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for param in group["params"]:
                tensor = param if masters else source_of.get(id(param), param)
                if id(tensor) not in seen and (tensor.requires_grad or id(tensor) in planned):
                    seen.add(id(tensor))
                    alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
            found.extend(alike.values())
    return found


def _finder(units: Sequence[GradUnit], *, masters: bool) -> FindFlat:
    by_first = {
        id(unit.params[0]): unit.flat
        for unit in units
        if unit.flat is not None and (masters or are_same(unit.params, unit.sources))
    }

    def find(tensors: Sequence[Tensor]) -> FlatGrads | None:
        flat = by_first.get(id(tensors[0]))
        return flat if flat is not None and are_same(flat.params, tensors) else None

    return find


def check_scales(smallest: float, largest: float) -> None:
    """Raise where processes have different loss scales.

    Raises:
        RanksDifferError: The message has both.
    """
    if smallest != largest:
        raise RanksDifferError(
            f"ranks of the process group have different loss scales: {smallest} and {largest}. Load amp.state_dict() "
            "on all of them, and call amp.scale_loss equally often"
        )


@disable_dynamo
def agree_on_overflow(found_inf: bool, scale: float, group: Any, device: torch.device, *, failed: bool = False) -> bool:
    """Whether any process of ``group`` has found inf or nan; all of them call this.

    Args:
        found_inf: What this one has found.
        scale: Its loss scale.
        group: A process group.
        device: Where the group communicates.
        failed: This process is about to raise.

    Raises:
        RanksDifferError: Another process is about to raise, or has another loss scale.
    """
    failed_rank = dist.get_rank(group) + 1.0 if failed else 0.0
    said = numbers_on([float(found_inf), scale, -scale, failed_rank], torch.float32, device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX, group=group)
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
