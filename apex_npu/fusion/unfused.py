# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Replacements of the C++ extension for ``storage.py``: nothing moves, and Python loops read and write tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from apex_npu.backends._torch_private import wraps_tensors
from apex_npu.ops import LOW_PRECISION

_GRAD, _DTYPE = attrgetter("grad"), attrgetter("dtype")


class SlotTable:
    """A record of the places of tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = list(map(_place, tensors))

    def broken(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of the tensors whose address, size, stride, dtype or device has changed."""
        return [i for i, (now, then) in enumerate(zip(map(_place, tensors), self._places, strict=True)) if now != then]


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype, tensor.device


def is_slot(tensor: Tensor) -> bool:
    """Return True if the memory of ``tensor`` is part of a fused buffer."""
    return False


def storage_view(src: Tensor, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor over ``src``'s memory that begins ``offset`` elements after ``src``'s first."""
    return src.detach().as_strided(size, stride, src.storage_offset() + offset)


def storage_views(src: Tensor, offsets: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Return a ``storage_view`` for each of ``offsets``, with the size and stride of the matching one of ``like``."""
    return [storage_view(src, offset, t.size(), t.stride()) for offset, t in zip(offsets, like, strict=True)]


def increment_versions(tensors: list[Tensor]) -> None:
    """Increment the versions of ``tensors``, which have been written through shared memory."""
    torch.autograd.graph.increment_version(tensors)


def drop_grads(tensors: list[Tensor]) -> None:
    """Set ``tensor.grad = None`` for each tensor."""
    for tensor in tensors:
        tensor.grad = None


def set_grads(tensors: list[Tensor], grads: list[Tensor]) -> None:
    """Set ``tensor.grad`` of each tensor to the matching one of ``grads``, which may be float32 for a 16-bit tensor."""
    for tensor, grad in zip(tensors, grads, strict=True):
        if tensor.dtype == grad.dtype or hasattr(tensor, "grad_dtype"):
            tensor.grad = grad
        else:  # torch before 2.10 refuses another dtype, but does not check a gradient when data changes
            (former,) = swap_data([tensor], [grad])
            tensor.grad = grad
            swap_data([tensor], [former])


def swap_data(params: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Give ``params`` the data of ``sources``, and return the former data; see ``csrc/amp/float32_data.h``.

    A parameter that changes its dtype gets another gradient accumulator, and loses the hooks on it.
    """
    former = [param.data for param in params]
    for param, source in zip(params, sources, strict=True):
        param.data = source
    return former


def grads_of(tensors: list[Tensor]) -> list[Tensor | None]:
    """Return ``tensor.grad`` of each tensor."""
    return list(map(_GRAD, tensors))


def any_grads(tensors: Sequence[Tensor]) -> bool:
    """Return True if one of ``tensors`` has a gradient."""
    return not all(map(is_, map(_GRAD, tensors), repeat(None)))


def low_precision_of(tensors: list[Tensor]) -> list[int]:
    """Return the indices of the float16 and bfloat16 tensors."""
    return [i for i, dtype in enumerate(map(_DTYPE, tensors)) if dtype in LOW_PRECISION]


def are_same(a: Sequence[object], b: Sequence[object]) -> bool:
    """Return True if both sequences have the same objects in the same order."""
    return len(a) == len(b) and all(map(is_, a, b))


def has_values(entries: dict[Any, Any], values: list[Any]) -> bool:
    """Return True if the values of ``entries`` are the same objects as ``values``, in the same order."""
    return are_same(list(entries.values()), values)


def hold_values(dicts: list[dict[str, Any]], keys: list[str], values: list[Any]) -> bool:
    """Return True if ``dicts[i].get(keys[i])`` is the object ``values[i]``, for each i."""
    return all(map(is_, map(dict.get, dicts, keys), values))


class WriteTable:
    """A record of the versions and addresses of tensors, to find those that are written or replaced later.

    It holds numbers, not tensors. All calls of one table must pass the same tensors, possibly with others appended.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int | None]] = []

    def add(self, tensors: list[Tensor]) -> None:
        """Record tensors that have no entry yet. All other methods also do this."""
        self._entries += map(_entry, tensors[len(self._entries) :])

    def note(self, tensors: list[Tensor], indices: Sequence[int] | None = None) -> None:
        """Record the current versions and addresses of all tensors, or of those at ``indices``."""
        self.add(tensors)
        for i in range(len(tensors)) if indices is None else indices:
            self._entries[i] = _entry(tensors[i])

    def written(self, tensors: list[Tensor]) -> list[int]:
        """Return the indices of the tensors whose version or address differs from the recorded one."""
        self.add(tensors)
        return [i for i, entry in enumerate(map(_entry, tensors)) if entry != self._entries[i]]

    def write(self, tensors: list[Tensor]) -> list[int]:
        """Return the result of ``written``, then increment the versions of the tensors and record them."""
        written = self.written(tensors)
        increment_versions(tensors)
        self.note(tensors)
        return written

    def counted(self, tensors: list[Tensor]) -> list[int]:
        """Return the indices of the tensors whose version differs from the recorded one."""
        self.add(tensors)
        return [i for i, (version, _) in enumerate(map(_entry, tensors)) if version != self._entries[i][0]]

    def note_grads(self, params: list[Tensor]) -> None:
        """Record the gradients of ``params`` instead of tensors, including those that are None.

        The gradients' versions are incremented, so that they differ from those of new tensors in the same memory.
        """
        grads = grads_of(params)
        increment_versions([grad for grad in grads if grad is not None])
        self._entries = list(map(_entry, grads))

    def changed_grads(self, params: list[Tensor]) -> tuple[list[int], list[int]]:
        """Return the indices of gradients that have been written or added, and of those whose address has changed.

        Neither list includes gradients that are None now.
        """
        written: list[int] = []
        moved: list[int] = []
        for i, (now, before) in enumerate(zip(map(_entry, grads_of(params)), self._entries, strict=True)):
            if now != before and now != _NO_GRAD:
                is_elsewhere = before != _NO_GRAD and now[1] != before[1]
                (moved if is_elsewhere else written).append(i)
        return written, moved


_NO_GRAD = (-1, None)
_PLAIN = {Tensor, torch.nn.Parameter}


def _entry(tensor: Tensor | None) -> tuple[int, int | None]:
    """Return the version of ``tensor``, 0 in inference mode, and its address, None if it has no memory."""
    if tensor is None:
        return _NO_GRAD
    has_memory = tensor.layout == torch.strided and (type(tensor) in _PLAIN or not wraps_tensors(tensor))
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr() if has_memory else None
