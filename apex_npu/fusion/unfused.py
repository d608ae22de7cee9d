# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Replacements of the C++ extension: ``storage.py`` without moves, and ``many_tensors.py`` one tensor at a time."""

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
    """True if the memory of ``tensor`` is part of a fused buffer."""
    return False


def storage_view(src: Tensor, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor over ``src``'s memory that begins ``offset`` elements after ``src``'s first."""
    return src.detach().as_strided(size, stride, src.storage_offset() + offset)


def storage_views(src: Tensor, offsets: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Return a ``storage_view`` for each of ``offsets``, with the size and stride of the matching one of ``like``."""
    return [storage_view(src, offset, t.size(), t.stride()) for offset, t in zip(offsets, like, strict=True)]


def round_to_copies(params: Tensor, flat: Tensor) -> bool:
    """Update a whole watched buffer as a kernel does, without a step; return False if ``flat`` is not watched."""
    return False


def written_copies(flat: Tensor) -> tuple[int, int]:
    """Return how many elements of a watched buffer, and of its parameters, were found written since the last call."""
    return 0, 0


def increment_versions(tensors: list[Tensor]) -> None:
    """Tell autograd that ``tensors`` have been written through memory that they share."""
    torch.autograd.graph.increment_version(tensors)


def drop_grads(tensors: list[Tensor]) -> None:
    """Set ``tensor.grad = None`` for each tensor."""
    for tensor in tensors:
        tensor.grad = None


@torch.no_grad()
def zero_grads(tensors: list[Tensor]) -> None:
    """Call ``tensor.grad.zero_()`` for each tensor that has a gradient."""
    grads = [grad for grad in map(_GRAD, tensors) if grad is not None]
    if grads:
        torch._foreach_zero_(grads)


def grads_of(tensors: list[Tensor]) -> list[Tensor | None]:
    """Return ``tensor.grad`` of each tensor."""
    return list(map(_GRAD, tensors))


def versions_of(tensors: list[Tensor | None]) -> list[int]:
    """Return autograd's count of writes to each tensor; 0 for None."""
    return [0 if tensor is None else tensor._version for tensor in tensors]


def any_grads(tensors: Sequence[Tensor]) -> bool:
    """True if one of ``tensors`` has a gradient."""
    return not all(map(is_, map(_GRAD, tensors), repeat(None)))


def hold_grads(tensors: list[Tensor], grads: list[Tensor | None], versions: list[int]) -> bool:
    """True if each tensor has the very gradient in ``grads``, or None, with the version in ``versions``, or 0."""
    now = grads_of(tensors)
    return are_same(now, grads) and versions_of(now) == versions


def low_precision_of(tensors: list[Tensor]) -> list[int]:
    """Return the indices of the float16 and bfloat16 tensors."""
    return [i for i, dtype in enumerate(map(_DTYPE, tensors)) if dtype in LOW_PRECISION]


def are_same(a: Sequence[object], b: Sequence[object]) -> bool:
    """True if both sequences have the very same items, in order."""
    return len(a) == len(b) and all(map(is_, a, b))


def has_values(entries: dict[Any, Any], values: list[Any]) -> bool:
    """True if the values of ``entries`` are the very objects of ``values``, in order."""
    return are_same(list(entries.values()), values)


def hold_values(dicts: list[dict[str, Any]], keys: list[str], values: list[Any]) -> bool:
    """True if ``dicts[i].get(keys[i])`` is the very object ``values[i]``, for each i."""
    return all(map(is_, map(dict.get, dicts, keys), values))


class WriteTable:
    """A record of the versions and addresses of tensors, which tells which have been written or replaced since.

    It holds numbers, not tensors. All calls of one table must pass the same tensors, to which others may be appended.
    """

    def __init__(self) -> None:
        # Two lists of numbers, since Python's garbage collector would look at one tuple per tensor.
        self._versions: list[int] = []
        self._addresses: list[int | None] = []

    def add(self, tensors: list[Tensor]) -> None:
        """Record tensors that have no entry yet. All other calls do this, too."""
        versions, addresses = _entries_of(tensors[len(self._versions) :])
        self._versions += versions
        self._addresses += addresses

    def note(self, tensors: list[Tensor], indices: Sequence[int] | None = None) -> None:
        """Record all tensors as they are now, or those at ``indices``."""
        self.add(tensors)
        chosen = range(len(tensors)) if indices is None else indices
        for i, version, address in zip(chosen, *_entries_of([tensors[i] for i in chosen]), strict=True):
            self._versions[i], self._addresses[i] = version, address

    def written(self, tensors: list[Tensor]) -> list[int]:
        """Return the indices of the tensors whose version or address differs from the recorded one."""
        self.add(tensors)
        versions, addresses = _entries_of(tensors)
        return sorted({*_differing(versions, self._versions), *_differing(addresses, self._addresses)})

    def write(self, tensors: list[Tensor]) -> list[int]:
        """Return what ``written`` does, for tensors about to be written; increment their versions and record them."""
        written = self.written(tensors)
        increment_versions(tensors)
        self.note(tensors)
        return written

    def counted(self, tensors: list[Tensor]) -> list[int]:
        """Return the indices of the tensors whose version differs from the recorded one."""
        self.add(tensors)
        return _differing(_entries_of(tensors)[0], self._versions)

    def note_grads(self, params: list[Tensor]) -> None:
        """Record ``param.grad`` of each parameter instead, also where it is None.

        The gradients' versions are incremented, so that they differ from those of new tensors in the same memory.
        """
        grads = grads_of(params)
        increment_versions([grad for grad in grads if grad is not None])
        self._versions, self._addresses = _entries_of(grads)

    def changed_grads(self, params: list[Tensor]) -> tuple[list[int], list[int]]:
        """Return the indices of gradients that have been written or added, and of those whose address has changed.

        Gradients that are None now are in neither list.
        """
        versions, addresses = _entries_of(grads_of(params))
        there = [before != _NO_GRAD for before in self._versions]
        moved = [i for i in _differing(addresses, self._addresses) if there[i] and versions[i] != _NO_GRAD]
        others = set(_differing(versions, self._versions)).difference(moved)
        return sorted(i for i in others if versions[i] != _NO_GRAD), moved


_NO_GRAD = -1


def _entries_of(tensors: Sequence[Tensor | None]) -> tuple[list[int], list[int | None]]:
    """Return the version of each tensor, _NO_GRAD for None, and its address, None without memory of its own."""
    wraps = {kind: wraps_tensors(tensor) for kind, tensor in {type(tensor): tensor for tensor in tensors}.items()}
    try:
        versions = [_NO_GRAD if t is None else t._version for t in tensors]
    except RuntimeError:  # tensors of inference mode have no version; asking each takes a third longer
        versions = [_NO_GRAD if t is None else 0 if t.is_inference() else t._version for t in tensors]
    addresses = [None if t is None or wraps[type(t)] or t.layout != torch.strided else t.data_ptr() for t in tensors]
    return versions, addresses


def _differing(now: Sequence[int | None], before: Sequence[int | None]) -> list[int]:
    """Return the indices where two lists of numbers differ."""
    return [] if now == before else [i for i, (a, b) in enumerate(zip(now, before, strict=True)) if a != b]


class RoundedCopies:
    """A record of float16 or bfloat16 copies of float32 CPU parameters, as they were last rounded.

    A script may write a copy or a parameter without autograd's count. If a copy is not its rounded parameter, the
    record tells which of the two was written.
    """

    def __init__(self) -> None:
        self._rounded: dict[int, tuple[int, Tensor]] = {}  # by the identity of the copy: its address, and its values

    @torch.no_grad()
    def take(self, params: list[Tensor], copies: list[Tensor]) -> tuple[list[int], list[int], list[int]]:
        """Copy into parameters what has been written to their copies since the last rounding.

        Returns:
            Three lists of indices of pairs: those whose copy has been written; those whose parameter has, maybe both;
            and those that are left out, because the rounded value is not known, as on other devices.
        """
        written: tuple[list[int], list[int], list[int]] = ([], [], [])
        for i, (param, copy) in enumerate(zip(params, copies, strict=True)):
            known = self._known(copy) if _is_pair(param, copy) else None
            if known is None:
                written[2].append(i)
                continue
            differs = _differs(param, copy)
            if differs.any():
                of_copy = not _same(known, copy)
                if not of_copy or not _same(known, param.to(copy.dtype)):
                    written[1].append(i)
                if of_copy:
                    written[0].append(i)
                    param.data.copy_(torch.where(differs, copy.to(param.dtype), param))
        return written

    @torch.no_grad()
    def write(self, params: list[Tensor], copies: list[Tensor]) -> list[int]:
        """Round each parameter into its copy, whose version stays; return the indices of pairs that are left out."""
        pairs = [i for i, pair in enumerate(zip(params, copies, strict=True)) if _is_pair(*pair)]
        if pairs:
            torch._foreach_copy_([copies[i].data for i in pairs], [params[i] for i in pairs])
        self._rounded = {}
        self.note([params[i] for i in pairs], [copies[i] for i in pairs])
        known = set(pairs)
        return [i for i in range(len(params)) if i not in known]

    def note(self, params: list[Tensor], copies: list[Tensor]) -> None:
        """Record that the present values of ``copies`` are those that their parameters have been rounded to."""
        pairs = [copy for param, copy in zip(params, copies, strict=True) if _is_pair(param, copy)]
        self._rounded.update({id(copy): (copy.data_ptr(), copy.detach().clone()) for copy in pairs})

    def written_copies(self, copies: list[Tensor]) -> list[int]:
        """Return the indices of the copies that have been written; change nothing."""
        known = [None if wraps_tensors(copy) else self._known(copy) for copy in copies]
        pairs = enumerate(zip(known, copies, strict=True))
        return [i for i, (rounded, copy) in pairs if rounded is not None and not _same(rounded, copy)]

    @torch.no_grad()
    def written_params(self, params: list[Tensor], copies: list[Tensor]) -> list[int]:
        """Return the indices of pairs whose parameter has been written and whose copy has not; change nothing."""
        written = []
        for i, (param, copy) in enumerate(zip(params, copies, strict=True)):
            known = self._known(copy) if _is_pair(param, copy) else None
            if known is not None and _differs(param, copy).any() and _same(known, copy):
                written.append(i)
        return written

    @torch.no_grad()
    def since(self, params: list[Tensor], copies: list[Tensor], places: list[Tensor]) -> tuple[list[int], list[int]]:
        """Compare pairs with the last rounding of the copies, whatever address these have now.

        Args:
            params: Parameters.
            copies: Their copies.
            places: The tensors where the copies were, for instance in a watched buffer; a copy itself if not known.

        Returns:
            The indices of the pairs whose copy still has the rounded values, and of those whose parameter would now be
            rounded to other values.
        """
        same_copies, other_params = [], []
        for i, (param, copy) in enumerate(zip(params, copies, strict=True)):
            if id(copy) in self._rounded and _is_pair(param, copy):
                _, known = self._rounded[id(copy)]
                same_copies += [i] if _same(known, copy) else []
                other_params += [i] if not _same(known, param.to(copy.dtype)) else []
        return same_copies, other_params

    def glance(self, params: list[Tensor], copies: list[Tensor]) -> bool:
        """True if a check of a few of the pairs finds a parameter that has been written."""
        step = len(copies) // 16 + 1
        return bool(self.written_params(params[::step], copies[::step]))

    def _known(self, copy: Tensor) -> Tensor | None:
        address, rounded = self._rounded.get(id(copy), (None, None))
        return rounded if address == copy.data_ptr() else None


def _differs(param: Tensor, copy: Tensor) -> Tensor:
    return (param.to(copy.dtype) != copy) & ~(param.isnan() & copy.isnan())


def _same(rounded: Tensor, copy: Tensor) -> bool:
    """True if both tensors have the same bits; NaNs of different bits are not equal."""
    return torch.equal(rounded.view(torch.int16), copy.detach().view(torch.int16))


def _is_pair(param: Tensor, copy: Tensor) -> bool:
    plain = not wraps_tensors(param) and param.device.type == copy.device.type == "cpu"
    return plain and param.dtype == torch.float32 and copy.dtype in LOW_PRECISION and param.shape == copy.shape
