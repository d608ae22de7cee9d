# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of sharded parameters (DTensor), handled as gradients of the plain tensors inside.

fully_shard reduces the gradients of a unit into one flat tensor; the gradient of each part is a view of it. CPU and GPU
kernels read and write these views in place. For an NPU, they are gathered into slots.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.backends import is_capturing
from apex_npu.backends._torch_private import dtensor_slots, memory_of_shards
from apex_npu.backends.script_warnings import warn
from apex_npu.fusion import FlatGrads
from apex_npu.fusion.grad_slots import InPlace
from apex_npu.fusion.shards import is_sharded, local_grad, local_part, sharded_like


def memory_of_parts(params: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """Return ``id(part)`` → the tensors that fully_shard has over the part's memory, padding included.

    The result has the parts of all ``params`` that fully_shard has cut.
    """
    sharded = list(filter(is_sharded, params))
    found = (memory_of_shards() if sharded and finds_parts() else None) or {}
    return {id(local_part(p)): found[id(p)] for p in sharded if id(p) in found}


def wait_for_moved_parts(parts: Iterable[Tensor]) -> None:
    """Wait until ``parts``, which have moved to other memory, have their values there.

    fully_shard gathers them in a separate stream. That stream waits for an optimizer's writes when a forward begins,
    but not in a backward, and the first block moves parts before a backward.
    """
    for device in {part.device for part in parts if part.device.type != "cpu"}:
        getattr(torch, device.type).current_stream(device).synchronize()


@functools.lru_cache(maxsize=1)
def finds_parts() -> bool:
    """Return whether the extension finds the parts of sharded parameters and their memory; warn once if not.

    Without the extension the result is False. Parts that are not found are stepped one by one, in place.
    """
    if extension is None:
        return False
    found = dtensor_slots() and memory_of_shards() is not None
    if not found:
        warn(
            f"torch {torch.__version__} keeps the memory of sharded parameters in a place that this package does "
            "not know: they are stepped one by one"
        )
    return found


class ShardGrads(FlatGrads):
    """``FlatGrads`` for the parts of sharded parameters, whose gradients are first taken from the parameters.

    Between calls only the parameters have gradients; gradients of the parts would keep the memory of gradients that a
    script has cleared.

    Attributes:
        full_params: The sharded parameters, one for each part; all are cut alike.
    """

    is_sharded = True

    def __init__(self, grads: FlatGrads, full_params: list[Tensor]) -> None:
        """Replace ``grads``, which has no gradients yet. ``full_params`` are the parameters of its parts."""
        super().__init__(grads.params, grads.offsets, grads.total_numel)
        self.full_params, self.gathers_all, self.memory.lends = full_params, grads.gathers_all, grads.memory.lends
        module: Any = sys.modules["torch.distributed.tensor"]
        self._shards: Any = extension.Shards(module.DTensor, full_params, self.params)
        self._holding: Any = self._shards if self.reads_in_place else None
        self._holds = self._has_brought = False

    def have_parts(self) -> bool:
        """Return whether each sharded parameter still has its part inside."""
        found: bool = self._shards.have_parts()
        return found

    def end_step(self) -> None:
        """Drop the gradients of the parts, and record that all parameters with a gradient have been stepped."""
        self.drop(stepped=True)

    def drop(self, *, stepped: bool = False) -> None:
        """Drop the gradients of the parts; if ``stepped``, count that the parameters have been written."""
        if self._holds or self._has_brought:
            self._shards.drop_grads(stepped)
        self._holds = self._has_brought = False

    def states(self, slots: range | None = None) -> bytes:
        """Return one byte per parameter, of all or of ``slots``: NONE, IN_BUFFER or ELSEWHERE."""
        found = super().states(slots)
        self.drop()
        return found

    def unscale_(self, inv_scale: float, found_inf: Tensor | None) -> None:
        """Multiply all gradients; the single pass of ``FlatGrads`` would look for gradients of the parts."""
        self._unscale_any(inv_scale, found_inf)
        self.drop()

    def _find(self, slots: range | None, in_place: InPlace, least_numel: int | None = None) -> tuple[bytes, list[int]]:
        stays = in_place != InPlace.NO and not self.gathers_all and not (self._addressed and is_capturing())
        if self._holding is not None and stays:
            states = self._holding.hold_grads(self.memory.slots, in_place)
            self._holds = states is not None
            if states is not None:
                return (states if slots is None else states[slots.start : slots.stop]), []
        self._bring()
        return super()._find(slots, in_place, least_numel)

    def _take_up(self) -> None:
        if not self._has_brought:
            self._bring()
        super()._take_up()

    def _bring(self) -> None:
        self._holds, self._has_brought = False, True
        for i in self._shards.bring_grads():
            part, full = self.params[i], self.full_params[i]
            part.grad = grad = local_grad(full)
            if grad is not None:
                full.grad = sharded_like(grad, full)

    def _gather(self, slots: range | None, states: bytes, to_gather: list[int]) -> bytes:
        found = super()._gather(slots, states, to_gather)
        self._shards.return_grads()
        return found

    def take(
        self,
        sources: Sequence[Tensor],
        inv_scale: float = 1.0,
        found_inf: Tensor | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Copy the gradients of ``sources`` into the slots, multiplied by ``inv_scale``, as ``FlatGrads`` does."""
        super().take(sources, inv_scale, found_inf, slots)
        self._shards.return_grads()

    def operand(self, slots: range, numel: int, *, writable: bool = True) -> Tensor:
        """Return the gradients of consecutive ``slots`` for ``ops`` to read, as ``FlatGrads`` does."""
        if not self._holds:
            return super().operand(slots, numel, writable=writable)
        listed: Tensor = self._holding.grad_list(self.memory.slots, slots.start, len(slots), numel)
        if self._addressed is not None:
            self._addressed.add_addresses(listed, slots)
        return listed

    def _operands(self, states: bytes) -> list[Tensor]:
        operands = super()._operands(states)
        self.drop()
        return operands
