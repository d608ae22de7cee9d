# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The parameters of an accelerator that are stepped on the host, and the transfers that this takes.

The host has a copy of each parameter, and the state. A step brings the gradients to the host, steps the copies there
with the kernels of the CPU, and sends the copies to the parameters. It does so in chunks: while one chunk is stepped,
gradients of the next ones arrive and the parameters of earlier ones leave, each in a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_npu.backends.script_warnings import warn
from apex_npu.fusion.flat_grads import FlatGrads
from apex_npu.fusion.grad_slots import InPlace, check_grad
from apex_npu.fusion.run import Run
from apex_npu.fusion.storage import WriteTable, drop_grads, grads_of, set_grads
from apex_npu.ops import Call

# Elements; a larger parameter is a chunk by itself.
CHUNK_NUMEL = 1 << 22
UNCOUNTED = (
    "parameters whose state is on the host have been written in a way that autograd's version counter does not count "
    "(.data, a collective). A step sees such writes only now and then, and overwrites the others. Write under "
    "torch.no_grad() instead of through .data"
)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def host_copy_of(param: Tensor, known: Tensor | None) -> Tensor:
    """Return a tensor on the host like ``param``: ``known`` if it is one; values are arbitrary."""
    if known is not None and is_copy_of(known, param):
        return known
    return torch.empty_like(param, device="cpu", requires_grad=False)


def is_copy_of(copy: Tensor, param: Tensor) -> bool:
    """Return whether ``copy`` has the shape and the dtype of ``param``, and ``param`` is on an accelerator."""
    return copy.shape == param.shape and copy.dtype == param.dtype and param.device.type != "cpu"


class HostGrads(FlatGrads):
    """``FlatGrads`` for copies on the host, whose gradients a step brings from the accelerator's parameters.

    Between steps the copies have no gradients.

    Attributes:
        full_params: The parameters on the accelerator, one for each of ``params``.
        chunk_of: The number of the chunk of each slot.
    """

    def __init__(self, grads: FlatGrads, full_params: list[Tensor]) -> None:
        """Replace ``grads``, which has no gradients yet, and give the copies the values of ``full_params``."""
        super().__init__(grads.params, grads.offsets, grads.total_numel)
        self.full_params = full_params
        self._chunks = _chunks([p.numel() for p in self.params])
        self.chunk_of = [number for number, chunk in enumerate(self._chunks) for _ in chunk]
        self._accelerator = full_params[0].device
        self._module: Any = torch.get_device_module(self._accelerator)
        self._down, self._up = (self._module.Stream(self._accelerator) for _ in range(2))
        # Pinned memory: for the gradients of each chunk, and for the parameters of two chunks in turn, each of these
        # with the event after which it is free.
        self._incoming: list[Tensor] = []
        self._outgoing: list[tuple[Tensor, Any]] = []
        self._arrivals: dict[int, Any] = {}  # by the number of a chunk
        self._has_brought = False
        self._steps = 0
        self._writes = WriteTable()
        self._copy(range(len(self.params)))

    def have_parts(self) -> bool:
        """Return whether ``params`` are still copies of ``full_params``, whose values may have changed."""
        written = self._writes.written(self.full_params)
        return all(is_copy_of(self.params[i], self.full_params[i]) for i in written)

    @torch.no_grad()
    def _copy(self, indices: Sequence[int]) -> None:
        """Give the copies ``indices`` the values of their parameters."""
        for i in indices:
            self.params[i].copy_(self.full_params[i])
        self._writes.note(self.full_params)

    def _look_for_uncounted(self) -> None:
        """In the steps 2, 8, 32, … compare all copies with their parameters, take what differs, and warn of it."""
        self._steps += 1
        if self._steps & (self._steps - 1) or self._steps.bit_length() % 2:
            return
        pairs = enumerate(zip(self.params, self.full_params, strict=True))
        changed = [i for i, (copy, param) in pairs if not torch.equal(_bits(copy), _bits(param.detach().cpu()))]
        if changed:
            self._copy(changed)
            warn(UNCOUNTED)

    def _find(self, slots: range | None, in_place: InPlace, least_numel: int | None = None) -> tuple[bytes, list[int]]:
        if in_place != InPlace.NO:
            in_place, least_numel = InPlace.READ, 0  # all stay: to gather one is to wait for it
        return super()._find(slots, in_place, least_numel)

    def _gather(self, slots: range | None, states: bytes, to_gather: list[int]) -> bytes:
        self.wait()
        return super()._gather(slots, states, to_gather)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Begin to copy all gradients to the host, and have them be those of the copies.

        Raises:
            RuntimeError: A gradient is sparse, not of its parameter's dtype, or a subclass such as DTensor; nothing has
                been copied then.
        """
        present = [(i, grad) for i, grad in enumerate(grads_of(self.full_params)) if grad is not None]
        for i, grad in present:
            param = self.full_params[i]
            check_grad(i, param, grad, torch.float32 if self.is_widened else param.dtype)
        self._copy(self._writes.written(self.full_params))
        self._look_for_uncounted()
        drop_grads(self.params)  # those of a step that has failed before its end
        self._has_brought = True
        dtypes = {grad.dtype for _, grad in present}
        if not dtypes:
            return
        pinned = self._memory(dtypes.pop() if len(dtypes) == 1 else torch.float32)
        for stream in (self._down, self._up):
            stream.wait_stream(self._module.current_stream(self._accelerator))
        by_chunk: dict[int, dict[int, Tensor]] = {}
        for i, grad in present:
            by_chunk.setdefault(self.chunk_of[i], {})[i] = grad
        for number, grads in by_chunk.items():
            slots, memory = list(grads), pinned[number][: self._numel(list(grads))]
            with self._module.stream(self._down):
                flat = torch.empty_like(memory, device=self._accelerator)
                torch._foreach_copy_(self._views_of(flat, slots), list(grads.values()))
                memory.copy_(flat, non_blocking=True)
                self._arrivals[number] = self._down.record_event()
            set_grads([self.params[i] for i in slots], self._views_of(memory, slots))

    def _memory(self, dtype: torch.dtype) -> list[Tensor]:
        if not self._incoming or self._incoming[0].dtype != dtype:
            sizes = map(self._numel, self._chunks)
            self._incoming = [torch.empty(n, dtype=dtype, device="cpu", pin_memory=True) for n in sizes]
        return self._incoming

    def _numel(self, slots: Sequence[int]) -> int:
        """Return the number of elements from the first of ``slots`` to the last, without the padding after it."""
        return self.offsets[slots[-1]] + self.params[slots[-1]].numel() - self.offsets[slots[0]]

    def _views_of(self, flat: Tensor, slots: Sequence[int]) -> list[Tensor]:
        """Return views of ``slots`` in ``flat``, which begins with the first of them."""
        first = self.offsets[slots[0]]
        placed = [(self.params[i], self.offsets[i] - first) for i in slots]
        return [flat.as_strided(p.size(), p.stride(), offset) for p, offset in placed]

    def wait(self, slots: range | None = None) -> None:
        """Wait until the gradients of ``slots``, or all, have arrived."""
        for number in list(self._arrivals) if slots is None else {self.chunk_of[i] for i in slots}:
            arrival = self._arrivals.pop(number, None)
            if arrival is not None:
                arrival.synchronize()

    @torch.no_grad()
    def send(self, run: Run) -> None:
        """Begin to copy the stepped copies of ``run`` to their parameters."""
        first = self.offsets[run.slots.start]
        for number in dict.fromkeys(self.chunk_of[i] for i in run.slots):
            slots = [i for i in self._chunks[number] if i in run.slots]
            begin, numel = self.offsets[slots[0]] - first, self._numel(slots)
            # Not from the run's own memory: torch_npu knows pinned memory only by its first address.
            memory = self._free_memory(run.param.dtype)
            memory[:numel].copy_(run.param[begin : begin + numel])
            with self._module.stream(self._up):
                flat = memory[:numel].to(self._accelerator, non_blocking=True)
                torch._foreach_copy_([self.full_params[i] for i in slots], self._views_of(flat, slots))
                self._outgoing.append((memory, self._up.record_event()))

    def _free_memory(self, dtype: torch.dtype) -> Tensor:
        if len(self._outgoing) < 2:
            numel = max(map(self._numel, self._chunks))
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
        memory, is_free = self._outgoing.pop(0)
        is_free.synchronize()
        return memory

    def end_step(self) -> None:
        """Have the current stream wait for the transfers, and drop the gradients of the copies."""
        if self._has_brought:
            for stream in (self._down, self._up):
                self._module.current_stream(self._accelerator).wait_stream(stream)
            drop_grads(self.params)
            self._writes.note(self.full_params)
            self._has_brought = False
            self._arrivals.clear()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def _chunks(numels: Sequence[int]) -> list[range]:
    """Return consecutive ranges of tensors, each with at most ``CHUNK_NUMEL`` elements or one tensor."""
    found, first, numel = [], 0, 0
    for i, count in enumerate(numels):
        if i > first and numel + count > CHUNK_NUMEL:
            found.append(range(first, i))
            first, numel = i, 0
        numel += count
    return [*found, range(first, len(numels))]


def sending(hosted: Sequence[HostGrads], calls: list[Call], runs: Sequence[tuple[Run, Any]]) -> list[Call]:
    """Return ``calls`` that wait for the gradients of their runs, and send the parameters to the accelerator.

    Args:
        hosted: The gradients that a step on the host reads; empty: the calls stay as they are.
        calls: The calls that update ``runs``, one for each.
        runs: The runs, each with its param group.
    """
    if not hosted:
        return calls
    holders = {id(p): grads for grads in hosted for p in grads.params}

    def stepped(run: Run, update: Callable[..., Any], operands: tuple[Any, ...], options: dict[str, Any]) -> None:
        grads = holders.get(id(run.params[0]))
        if grads is not None:
            grads.wait(run.slots)
        update(*operands, **options)
        if grads is not None:
            grads.send(run)

    return [(stepped, (run, *call), {}) for call, (run, _) in zip(calls, runs, strict=True)]
