# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules with norms over whole parameters, or their rows, for sharded parameters (DTensor).

Such a rule is a generator for each run: it yields the addend of this process to a sum, and receives the sum over all
processes that share the parameter. ``_update_parts`` drives the generators of all runs, with one all-reduce of one
vector for each sum.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from apex_npu.distributed.part_sums import PartSums
from apex_npu.fusion import Run, are_same
from apex_npu.fusion.run import row_count
from apex_npu.fusion.shards import Along
from apex_npu.ops import norm, segment_dot
from apex_npu.optimizers.base import FusedOptimizer, ParamGroup


class Addend(NamedTuple):
    """The addends of one process to numbers of each parameter of a run, or of each row.

    Attributes:
        values: (k, n): k numbers for each of n parameters or rows.
        along: The processes that add; with ``COLUMNS`` the numbers belong to rows, else to parameters.
        largest: The result is the largest addend instead of the sum.
    """

    values: Tensor
    along: Along = Along.ALL
    largest: bool = False


Parts = Generator[Addend, Tensor, None]


def alone(parts: Parts) -> None:
    """Run ``parts`` on whole parameters, where each addend is the sum."""
    addend = next(parts, None)
    while addend is not None:
        addend = _send(parts, addend.values)


class NormOptimizer(FusedOptimizer):
    """Base class of the rules with norms over whole parameters. ``parts`` is the rule for parts of parameters."""

    def parts(self, run: Run, group: ParamGroup) -> Parts:
        """Apply the rule to ``run``, as ``update`` does. Yield addends, and receive their sums over all processes.

        The rule may overwrite the received values.
        """
        raise NotImplementedError(f"{type(self).__name__} must define parts(run, group)")

    def grad_norm(self, runs: list[tuple[Run, ParamGroup]]) -> Tensor:
        """Return the 2-norm of all gradients of ``runs``, 0-dim, float32 or wider. One device needs no host sync."""
        if not self._fused.is_any_sharded():
            norms = [norm(run.scaled_grad) / _scale(run) for run, _ in runs]
        else:
            # Divided gradients, because sums of squares of scaled gradients leave the range of float32.
            pairs = [(run, run.wide_grad()) for run, _ in runs]
            squares = [(run, Addend(segment_dot(g, g, *run.segments()).unsqueeze(0))) for run, g in pairs]
            norms = [total.sum().sqrt() for total in self._add_up(squares)]
        found: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        return found

    def _forget_fusion(self) -> None:
        super()._forget_fusion()
        self._plans: dict[Any, tuple[list[Run], _Plan]] = {}

    def _update_parts(self, runs: list[tuple[Run, ParamGroup]]) -> None:
        started = [(run, self.parts(run, group)) for run, group in runs]
        going = [(run, parts, next(parts, None)) for run, parts in started]
        while waiting := [(run, parts, addend) for run, parts, addend in going if addend is not None]:
            sums = self._add_up([(run, addend) for run, _, addend in waiting])
            going = [(run, parts, _send(parts, total)) for (run, parts, _), total in zip(waiting, sums, strict=True)]

    def _add_up(self, pairs: Sequence[tuple[Run, Addend]]) -> list[Tensor]:
        """Return the sums of each addend over the processes that share the parameters of its run."""
        found: dict[int, Tensor] = {}
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, (_, (values, along, largest)) in enumerate(pairs):
            key = (along.value, largest, len(values), str(values.dtype), values.device.type)
            kinds.setdefault(key, []).append(i)
        # Processes may have different runs, because they do not all step the same parameters in place.
        for key, members in sorted(kinds.items()):
            along, op = Along(key[0]), dist.ReduceOp.MAX if key[1] else dist.ReduceOp.SUM
            plan = self._plan(key, [pairs[i][0] for i in members], along)
            total = plan.add_up(torch.cat([pairs[i][1].values for i in members], 1), op)
            found.update(zip(members, total, strict=True))
        return [found[i] for i in range(len(pairs))]

    def _plan(self, key: Any, runs: list[Run], along: Along) -> _Plan:
        known = self._plans.get(key)
        if known is None or not are_same(known[0], runs):
            places = {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
            known = self._plans[key] = (runs, _Plan(runs, self._fused.full_param_of, places, along))
        return known[1]


class _Plan:
    """The order in which numbers of some runs are added up: the order of parameters, equal on all processes."""

    def __init__(
        self, runs: list[Run], full_param_of: Callable[[Tensor], Tensor], places: dict[int, int], along: Along
    ) -> None:
        counts = [[row_count(p) if along is Along.COLUMNS else 1 for p in run.params] for run in runs]
        self._sizes = list(map(sum, counts))
        owners = [
            full_param_of(p)
            for run, of_run in zip(runs, counts, strict=True)
            for p, count in zip(run.params, of_run, strict=True)
            for _ in range(count)
        ]
        order = sorted(range(len(owners)), key=lambda i: places[id(owners[i])])  # rows of one stay in order
        self._order = torch.tensor(order, dtype=torch.int64, device="cpu")
        self._sums = PartSums([owners[i] for i in order], along)

    def add_up(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> list[Tensor]:
        order = self._order.to(values.device)
        total = self._sums.reduce(values.index_select(1, order), op)
        return list(torch.empty_like(values).index_copy_(1, order, total).split(self._sizes, 1))


def _send(parts: Parts, total: Tensor) -> Addend | None:
    try:
        return parts.send(total)
    except StopIteration:
        return None


def _scale(run: Run) -> float | Tensor:
    return 1.0 if run.grad_scale is None else run.grad_scale.squeeze()
