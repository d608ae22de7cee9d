# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of sharded parameters: those of the plain parts inside, wherever fully_shard has left them.

fully_shard reduces the gradients of a unit into one flat tensor, of which each gradient's part is a view. Kernels of the
CPU read and write these views in place. Other devices gather them into slots.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.backends._torch_private import dtensor_slots, memory_of_shards
from apex_npu.backends.script_warnings import warn
from apex_npu.distributed.shards import is_sharded, local_grad, local_part, sharded_like
from apex_npu.fusion import FlatGrads, increment_versions
from apex_npu.fusion.grad_slots import FOREIGN, GradSlots, InPlace


class Shards(Protocol):
    """Sharded parameters (owners) and the plain tensors inside of them (parts), all read in one call."""

    def have_parts(self) -> bool:
        """True while each owner has its part inside."""
        ...

    def bring_grads(self) -> list[int]:
        """Give each part the gradient inside of its owner's, or None.

        Returns:
            The indices of those that are left without, since that is no DTensor, is cut in another way than its owner,
            or has a subclass inside.
        """
        ...

    def return_grads(self) -> None:
        """The other way: the gradients of owners have inside what their parts have as gradient."""
        ...

    def drop_grads(self, stepped: bool) -> None:
        """Drop the gradients of parts. With ``stepped`` autograd notices that their owners have been written."""
        ...


class ShardsInPlace(Shards, Protocol):
    """Those whose gradients can be used where fully_shard has left them."""

    def look_at_grads(self, slots: GradSlots, loose_for: int) -> bytes:
        """Hold what is inside of the gradients of owners until ``drop_grads``.

        Returns:
            One byte for each: NONE, EXTERNAL, or FOREIGN where it cannot be used in place.
        """
        ...

    def place(self, slots: GradSlots, first: int, count: int, numel: int) -> Tensor:
        """What is held, of ``count`` slots from ``first`` on, as one operand for ``ops``."""
        ...


def _shards_in_place(owners: list[Tensor], parts: list[Tensor]) -> ShardsInPlace | None:
    if extension is None or parts[0].device.type != "cpu" or not _finds_parts():
        return None
    module: Any = sys.modules["torch.distributed.tensor"]
    made: ShardsInPlace = extension.Shards(module.DTensor, owners, parts)
    return made


def memory_of_parts(params: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """``id(part)`` → the tensors that fully_shard has over its memory, padding included.

    Of the sharded ones of ``params`` that fully_shard has cut.
    """
    sharded = list(filter(is_sharded, params))
    found = (memory_of_shards() if sharded and _finds_parts() else None) or {}
    return {id(local_part(p)): found[id(p)] for p in sharded if id(p) in found}


@functools.lru_cache(maxsize=1)
def _finds_parts() -> bool:
    """Whether this torch keeps the memory of sharded parameters where it is looked for; warns once where it does not."""
    found = dtensor_slots() and memory_of_shards() is not None
    if not found:
        warn(
            f"torch {torch.__version__} keeps the memory of sharded parameters elsewhere than those releases that this "
            "package knows: their gradients are copied in each step, and unevenly sharded ones are stepped one by one"
        )
    return found


class _PythonShards:
    """In pure torch."""

    def __init__(self, owners: list[Tensor], parts: list[Tensor]) -> None:
        self._owners, self._parts = owners, parts

    def have_parts(self) -> bool:
        return all(local_part(owner) is part for owner, part in zip(self._owners, self._parts, strict=True))

    def bring_grads(self) -> list[int]:
        others = []
        for i, (owner, part) in enumerate(zip(self._owners, self._parts, strict=True)):
            grad: Any = owner.grad
            part.grad = None
            if grad is None:
                continue
            if is_sharded(grad) and grad.placements == owner.placements and type(local_part(grad)) is Tensor:
                part.grad = local_part(grad)
            else:
                others.append(i)
        return others

    def return_grads(self) -> None:
        for owner, part in zip(self._owners, self._parts, strict=True):
            if part.grad is not None and local_part(owner.grad) is not part.grad:
                owner.grad = sharded_like(part.grad, owner)

    def drop_grads(self, stepped: bool) -> None:
        written = [owner for owner, part in zip(self._owners, self._parts, strict=True) if part.grad is not None]
        for part in self._parts:
            part.grad = None
        if stepped:
            increment_versions(written)


class ShardGrads(FlatGrads):
    """``FlatGrads`` of the parts of sharded parameters, whose gradients have to be brought to them.

    Between calls the gradients are those of the owners: parts would keep the memory of what a script has cleared.
    """

    def __init__(self, grads: FlatGrads, owners: list[Tensor]) -> None:
        """``owners`` of the parts in ``grads``, which has none of their gradients yet."""
        super().__init__(grads.params, grads.offsets, grads.total_numel)
        self.owners = owners
        self._in_place = _shards_in_place(owners, self.params)
        self._shards: Shards = self._in_place or _PythonShards(owners, self.params)
        self._held: ShardsInPlace | None = None

    def have_parts(self) -> bool:
        """True while each owner has its part inside."""
        return self._shards.have_parts()

    def end_step(self) -> None:
        """What has a gradient has been stepped."""
        self._drop(stepped=True)

    def forget_stepped(self) -> None:
        self._drop()

    def _drop(self, *, stepped: bool = False) -> None:
        self._held = None
        self._shards.drop_grads(stepped)

    def _find(self, slots: range | None, in_place: InPlace, least_numel: int | None = None) -> bytes:
        self._held = None
        if self._in_place is not None and in_place != InPlace.NO:
            kind = InPlace.WRITE_PARTS if in_place >= InPlace.WRITE else InPlace.READ_AGAIN
            states = self._in_place.look_at_grads(self._plan_slots(), kind)
            if FOREIGN not in states:
                self._held = self._in_place
                return states if slots is None else states[slots.start : slots.stop]
        self._bring()
        return super()._find(slots, InPlace.READ_AGAIN if in_place == InPlace.READ else in_place, least_numel)

    def _bring(self) -> None:
        for i in self._shards.bring_grads():
            part, owner = self.params[i], self.owners[i]
            part.grad = local_grad(owner)
            owner.grad = sharded_like(part.grad, owner)

    def _gather(self, slots: range | None, states: bytes) -> bytes:
        found = super()._gather(slots, states)
        if FOREIGN in states:
            self._shards.return_grads()
        return found

    def take(
        self,
        sources: Sequence[Tensor],
        inv_scale: float = 1.0,
        found_inf: Tensor | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        super().take(sources, inv_scale, found_inf, slots)
        self._shards.return_grads()

    def operand(self, slots: range, numel: int, *, stepped: bool = False) -> Tensor:
        if self._held is not None:
            return self._held.place(self._plan_slots(), slots.start, len(slots), numel)
        return super().operand(slots, numel)

    def _operands(self, states: bytes) -> list[Tensor]:
        operands = super()._operands(states)
        self._drop()
        return operands
