# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of sharded parameters (DTensor), handled as gradients of the plain tensors inside.

fully_shard reduces the gradients of a unit into one flat tensor; the gradient of each part is a view of it. CPU and GPU
kernels read and write these views in place. For an NPU, they are gathered into slots.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.backends._torch_private import memory_of_shards
from apex_npu.backends.script_warnings import warn
from apex_npu.fusion import FlatGrads
from apex_npu.fusion.grad_slots import InPlace
from apex_npu.fusion.shards import is_sharded, local_grads, local_part, put_parts_inside
from apex_npu.fusion.storage import drop_grads, grads_of, increment_versions, set_grads

_PART = operator.attrgetter("_local_tensor")


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
    """Return whether the package finds the memory of sharded parameters; warn once if not.

    Without the extension the result is False. Parts whose memory is not found are stepped one by one, in place.
    """
    if extension is None:
        return False
    found = memory_of_shards() is not None
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
        self._brought: Sequence[Tensor] = ()  # the sharded parameters whose gradients the parts have now

    def have_parts(self) -> bool:
        """Return whether each sharded parameter still has its part inside."""
        return all(map(operator.is_, map(_PART, self.full_params), self.params))

    def end_step(self) -> None:
        """Drop the gradients of the parts, and record that all parameters with a gradient have been stepped."""
        increment_versions(list(self._brought))
        self.drop()

    def drop(self) -> None:
        """Drop the gradients of the parts."""
        if self._brought:
            drop_grads(self.params)
        self._brought = ()

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
        self._bring()
        return super()._find(slots, in_place, least_numel)

    def _take_up(self) -> None:
        if not self._brought:
            self._bring()
        super()._take_up()

    def _bring(self) -> None:
        """Give each part the tensor inside the gradient of its parameter."""
        parts, params, found = self.params, self.full_params, local_grads(self.full_params)
        grads = [grad for grad in found if grad is not None]
        if len(grads) < len(found):
            drop_grads(parts)
            parts, params = ([t for t, grad in zip(p, found, strict=True) if grad is not None] for p in (parts, params))
        set_grads(parts, grads)
        self._brought = params

    def _return(self) -> None:
        """Put the gradients of the parts inside the gradients of the sharded parameters."""
        put_parts_inside(grads_of(self.full_params), grads_of(self.params))

    def _gather(self, slots: range | None, states: bytes, to_gather: list[int]) -> bytes:
        found = super()._gather(slots, states, to_gather)
        self._return()
        return found

    def take(self, inv_scale: float = 1.0, found_inf: Tensor | None = None, slots: Sequence[int] | None = None) -> None:
        """Copy the gradients into the slots, multiplied by ``inv_scale``, as ``FlatGrads`` does."""
        super().take(inv_scale, found_inf, slots)
        self._return()

    def _operands(self, states: bytes) -> list[Tensor]:
        operands = super()._operands(states)
        self.drop()
        return operands
