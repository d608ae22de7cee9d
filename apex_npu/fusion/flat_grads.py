# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of some parameters in one flat buffer.

A slot is ABSENT while ``param.grad is None``, as ``zero_grad()`` leaves it, and PRESENT while ``param.grad`` is the
slot's view. Autograd, or the user, may put any other tensor there: ``gather`` copies it into the slot. Large ones may
as well stay where they are (LOOSE), for whoever can work on several pieces: on a CPU copying one costs half as much as
its step of Adam, and a call of its own next to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_

import numpy as np
import torch
from torch import Tensor

from apex_npu.fusion.flat_buffer import FlatBuffer, plan
from apex_npu.fusion.many_tensors import increment_versions
from apex_npu.fusion.storage import SlotTable, grad_states, has_unnamed_aliases, is_slot, owns_memory, slot_table
from apex_npu.ops import gather_, gathers_in_one_pass, take_grads_, unscale_grads

ABSENT, PRESENT, FOREIGN, LOOSE = 0, 1, 2, 3
# From how many elements on.
LOOSE_NUMEL = 1 << 18
# Gathered at once in pure torch: what has been copied is still in the cache when it is looked at.
_BATCH_NUMEL = 1 << 16
_GRAD, _DTYPE, _LAYOUT = attrgetter("grad"), attrgetter("dtype"), attrgetter("layout")


class FlatGrads:
    """Gradient slots of ``params``, laid out like the parameters themselves; memory is taken at first use.

    Attributes:
        params: Each has a slot, whether or not it ever gets a gradient.
        offsets: For each parameter, the elements before its slot's first.
    """

    def __init__(self, params: Sequence[Tensor], offsets: Sequence[int], total_numel: int) -> None:
        """Plan only; ``params`` share dtype and device."""
        self.params = list(params)
        self.offsets = list(offsets)
        self._total_numel = total_numel
        self._buffer: FlatBuffer | None = None
        self._shapes: list[Tensor] = []
        self._views: list[Tensor] = []
        self._view_table: SlotTable | None = None
        self._padding: Tensor | None = None
        self._batched: tuple[list[int], list[range]] = ([], [])
        # In which slots a gradient may stay out.
        on_cpu = bool(self.params) and self.params[0].device.type == "cpu"
        self._large = [i for i, p in enumerate(self.params) if on_cpu and p.numel() >= LOOSE_NUMEL]
        self._table = slot_table(self.params)

    @classmethod
    def apart(cls, params: Sequence[Tensor]) -> FlatGrads:
        """Slots in the order of ``params``, wherever those lie; each has one of its own."""
        planned = plan([torch.empty_like(p, device="meta") for p in params])
        return cls(params, planned.offsets, planned.layout.total_numel)

    def _allocate(self) -> FlatBuffer:
        if self._buffer is None:
            self._buffer = FlatBuffer(self._total_numel, self.params[0].dtype, self.params[0].device)
            # Shaped like what autograd makes: a parameter's strides where they are dense, else contiguous.
            self._shapes = [torch.empty_like(p, device="meta") for p in self.params]
            self._views = self._buffer.views_like(self._shapes, self.offsets)
            self._view_table = slot_table(self._views)
        return self._buffer

    @property
    def flat(self) -> Tensor:
        """All slots and their padding, which is zero. Slots that are ABSENT hold whatever was there last."""
        return self._allocate().flat

    @property
    def views(self) -> list[Tensor]:
        """One per parameter, shaped like it."""
        self._allocate()
        self._replace_lost_views()
        return self._views

    def clear_padding(self) -> None:
        """Write zeros between the slots."""
        if self._padding is None:
            used = torch.zeros(self._total_numel, dtype=torch.bool)
            for param, offset in zip(self.params, self.offsets, strict=True):
                used[offset : offset + param.numel()] = True
            self._padding = (~used).nonzero().flatten().to(self.flat.device)
        self.flat.index_fill_(0, self._padding, 0.0)

    def states(self, slots: range | None = None) -> bytes:
        """One byte per parameter, of all or of those of ``slots``: ABSENT, PRESENT or FOREIGN."""
        states = self._states(slots)
        return self._states(slots) if PRESENT in states and self._replace_lost_views() else states

    def _states(self, slots: range | None) -> bytes:
        views = self._views or self.params
        if slots is None:
            return grad_states(self.params, views)
        return grad_states(self.params[slots.start : slots.stop], views[slots.start : slots.stop])

    def _replace_lost_views(self) -> bool:
        """``p.grad.data = ...`` takes a view out of its slot: from then on it is a gradient like any other."""
        if self._buffer is None or self._view_table is None:
            return False
        lost = self._view_table.broken(self._views)
        for i in lost:
            self._views[i] = self._buffer.view(self.offsets[i], self._shapes[i].size(), self._shapes[i].stride())
        return bool(lost)

    def broken(self) -> list[int]:
        """Indices of the parameters that no longer have the address, shape, dtype or device they were planned with."""
        return self._table.broken(self.params)

    def span(self, slots: range) -> Tensor:
        """The memory of consecutive ``slots``, padding included."""
        end = self.offsets[slots.stop] if slots.stop < len(self.offsets) else self._total_numel
        return self.flat[self.offsets[slots.start] : end]

    def slots_of(self, tensors: Sequence[Tensor], offsets: Sequence[int]) -> range | None:
        """Where the gradients of ``tensors`` lie next to each other, as far apart as ``offsets`` are; None: nowhere."""
        first = next((i for i, p in enumerate(self.params) if p is tensors[0]), None)
        if first is None:
            return None
        last = first + len(tensors)
        apart = [offset - self.offsets[first] for offset in self.offsets[first:last]]
        alike = len(apart) == len(offsets) and apart == [offset - offsets[0] for offset in offsets]
        return range(first, last) if alike and all(map(is_, tensors, self.params[first:last])) else None

    def all_present(self, slots: range | None = None) -> bool:
        """True where each of ``slots``, or of all, is PRESENT."""
        states = self.states(slots)
        return states.count(PRESENT) == len(states)

    def gather(self, slots: range | None = None, *, leave_large: bool = False, to_be_written: bool = False) -> bytes:
        """Bring every gradient into its slot: afterwards ``param.grad`` is None or the slot's view.

        Args:
            slots: Which; None: all.
            leave_large: Leave large gradients where they are, if they are laid out like their slots.
            to_be_written: Only those that share their memory with nobody.

        Returns:
            One byte per parameter, ABSENT or PRESENT, or LOOSE where it has been left.

        Raises:
            RuntimeError: A gradient is sparse, not of its parameter's dtype, or a subclass such as DTensor; nothing has
                been copied then.
        """
        states = self.states(slots)
        if FOREIGN not in states:
            return states
        first, views = 0 if slots is None else slots.start, self.views
        loose = self._loose((i for i in self._large if states[i] == FOREIGN), views) if leave_large else []
        if to_be_written:
            loose = self._unshared(loose)
        if loose:
            states = _replaced(states, loose)
        if PRESENT not in states and gathers_in_one_pass(self.flat):
            self._take(self.params, views, range(first, first + len(states)), loose, 1.0, None)
        else:
            foreign = [i for i, state in enumerate(states, first) if state == FOREIGN]
            params, slots_of_them = ([tensors[i] for i in foreign] for tensors in (self.params, views))
            gather_(slots_of_them, self._readable(foreign, list(map(_GRAD, params)), self.params))
            _set_grads(params, slots_of_them)
        return states.replace(bytes([FOREIGN]), bytes([PRESENT]))

    def gather_times(self, factor: float, slots: range) -> bytes:
        """``gather(slots)``, then multiply what lies there by ``factor``; in one pass where the device allows."""
        states = self.states(slots)
        if PRESENT not in states and FOREIGN in states and gathers_in_one_pass(self.flat):
            self._take(self.params, self.views, slots, [], factor, None)
            return states.replace(bytes([FOREIGN]), bytes([PRESENT]))
        states = self.gather(slots)
        if factor != 1.0 and PRESENT in states:
            self.span(slots).mul_(factor)
        return states

    def take(self, sources: Sequence[Tensor], inv_scale: float = 1.0, found_inf: Tensor | None = None) -> None:
        """Multiply the gradients of ``sources`` in one pass, and bring them into the slots; see ``ops.take_grads_``.

        Large ones that need not go anywhere else are multiplied where they are.

        Raises:
            RuntimeError: A gradient is sparse, not of its parameter's dtype, or a subclass such as DTensor; nothing has
                been copied then.
        """
        views = self.views
        loose = self._unshared(self._loose((i for i in self._large if sources[i] is self.params[i]), views))
        self._take(sources, views, range(len(self.params)), loose, inv_scale, found_inf)
        self._unscale_loose(loose, inv_scale, found_inf)

    def unscale_(self, inv_scale: float, found_inf: Tensor | None) -> None:
        """Multiply all gradients; those that are not in their slots yet are brought there, but for large ones.

        Args:
            inv_scale: 1 / loss scale.
            found_inf: float32, one element; set to 1 where a gradient is not finite. None: do not look.

        Raises:
            RuntimeError: As of ``gather``.
        """
        states = self.gather(leave_large=True, to_be_written=True)
        self._unscale_loose(_places_of(LOOSE, states), inv_scale, found_inf)
        unscale_grads([self.span(slots) for slots in _stretches(states)], inv_scale, found_inf)

    def _unscale_loose(self, loose: list[int], inv_scale: float, found_inf: Tensor | None) -> None:
        in_place = [self.loose(i) for i in loose]
        unscale_grads(in_place, inv_scale, found_inf)
        if inv_scale != 1.0:
            increment_versions(in_place)

    def _take(
        self,
        sources: Sequence[Tensor],
        views: Sequence[Tensor],
        slots: range,
        but: list[int],
        inv_scale: float,
        found_inf: Tensor | None,
    ) -> None:
        left = set(but)
        indices: Sequence[int] = [i for i in slots if i not in left] if left else slots
        if not gathers_in_one_pass(self.flat):
            self._take_batches(sources, views, indices, inv_scale, found_inf)
            return

        def among(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [tensors[i] for i in indices] if left else tensors[slots.start : slots.stop]

        unfit = take_grads_(among(sources), among(self.params), among(views), inv_scale, found_inf)
        if unfit is not None:
            source, param = sources[indices[unfit]], self.params[indices[unfit]]
            self._check_grad(indices[unfit], source.grad, own=source is param)

    def _take_batches(
        self,
        sources: Sequence[Tensor],
        views: Sequence[Tensor],
        indices: Sequence[int],
        inv_scale: float,
        found_inf: Tensor | None,
    ) -> None:
        """What ``take_grads_`` does, for some neighbours at a time."""
        given = list(map(_GRAD, sources))
        there = [i for i in indices if given[i] is not None]
        grads = self._readable(there, [given[i] for i in there], sources)
        done = 0
        for batch in self._batches(there):
            gather_(views[batch.start : batch.stop], grads[done : done + len(batch)])
            unscale_grads([self.span(batch)], inv_scale, found_inf)
            done += len(batch)
        _set_grads([self.params[i] for i in there], [views[i] for i in there])

    def _batches(self, indices: list[int]) -> list[range]:
        """Neighbours among ``indices``, so many as are worth a call."""
        if self._batched[0] != indices:
            found = []
            begin = 0
            for k in range(1, len(indices) + 1):
                first = indices[begin]
                if (
                    k == len(indices)
                    or indices[k] != indices[k - 1] + 1
                    or self.offsets[indices[k]] - self.offsets[first] >= _BATCH_NUMEL
                ):
                    found.append(range(first, indices[k - 1] + 1))
                    begin = k
            self._batched = (indices, found)
        return self._batched[1]

    def _readable(self, indices: Sequence[int], grads: list[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
        """``grads``, of ``sources[i]`` for each of ``indices``, but copies of those that lie in slots, to be written.

        Raises:
            RuntimeError: One is sparse, not of its parameter's dtype, or a subclass such as DTensor.
        """
        alike = set(map(type, grads)) <= {Tensor} and set(map(_LAYOUT, grads)) <= {torch.strided}
        if not alike or not set(map(_DTYPE, grads)) <= {self.flat.dtype}:
            for i, grad in zip(indices, grads, strict=True):
                self._check_grad(i, grad, own=sources[i] is self.params[i])
        begin = np.uint64(self.flat.data_ptr())
        behind = np.fromiter(map(Tensor.data_ptr, grads), np.uint64, len(grads)) - begin  # huge where it is before
        for k in np.flatnonzero(behind < self.flat.nbytes).tolist():
            grads[k] = grads[k].clone()
        return grads

    def _loose(self, indices: Iterable[int], views: Sequence[Tensor]) -> list[int]:
        """Those whose gradient has its slot's dtype and layout, and memory of its own."""
        return [i for i in indices if _fits(self.params[i].grad, views[i])]

    def _unshared(self, indices: list[int]) -> list[int]:
        """Those whose gradient nobody else looks at, so that it may be written.

        Two gradients, of this buffer or of another, can be views of one tensor: autograd leaves them so for
        ``a.view(-1) + b.view(-1)``. Or they are one tensor, which a user has given to both.
        """
        return [i for i in indices if (grad := self.params[i].grad) is not None and _is_alone(grad)]

    def loose(self, index: int) -> Tensor:
        """The gradient of parameter ``index``, which fits, as one piece."""
        grad = self.params[index].grad
        assert grad is not None
        return grad.detach().as_strided((grad.numel(),), (1,))

    def pieces(self) -> tuple[list[Tensor], list[Tensor]]:
        """All gradients in few pieces, 1-D: those that are LOOSE, and stretches of the buffer, padding included."""
        states = self.gather(leave_large=True, to_be_written=True)
        loose = [self.loose(i) for i in _places_of(LOOSE, states)]
        return loose, [self.span(slots) for slots in _stretches(states)]

    def zero_(self) -> None:
        """Write zeros into all gradients that are there; they lie in their slots then."""
        states = self.gather()
        if states.count(PRESENT) == len(states):
            self.flat.zero_()
        elif PRESENT in states:
            torch._foreach_zero_([self._views[i] for i in _places_of(PRESENT, states)])

    def mask(self) -> Tensor:
        """float32, 1-D: one where a gradient is PRESENT, zero in padding and in ABSENT slots."""
        states = self.gather()
        mask = torch.zeros_like(self.flat, dtype=torch.float32)
        for view, offset, state in zip(self.views, self.offsets, states, strict=True):
            if state == PRESENT:
                mask[offset : offset + view.numel()] = 1.0
        return mask

    def _check_grad(self, index: int, grad: Tensor | None, *, own: bool) -> None:
        """Raise where ``grad``, parameter ``index``'s own or that of its model parameter, cannot be fused."""
        param = self.params[index]
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"parameter {index} of shape {tuple(param.shape)} has a sparse gradient ({grad.layout}), which cannot "
                "be fused; use a layer with sparse=False, or torch.optim.SparseAdam or SGD for it"
            )
        if own and grad.dtype != param.dtype:
            raise RuntimeError(
                f"parameter {index} of shape {tuple(param.shape)} is {param.dtype} and has a gradient in {grad.dtype}, "
                "which cannot be fused; leave its grad_dtype as it was, or use the unfused optimizer"
            )
        if _dispatches_in_python(grad):
            raise RuntimeError(
                f"parameter {index} of shape {tuple(param.shape)} is a plain tensor and has a {type(grad).__name__} as "
                "gradient, which cannot be fused; give it a plain tensor (of a DTensor its full_tensor()), or None"
            )


def _set_grads(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def _fits(grad: Tensor | None, view: Tensor) -> bool:
    """True where a gradient has its slot's dtype and layout, and memory of its own."""
    return (
        grad is not None
        and grad.layout == torch.strided
        and not _dispatches_in_python(grad)
        and not grad.requires_grad  # create_graph=True: writing it would falsify its graph
        and grad.dtype == view.dtype
        and grad.stride() == view.stride()
        and not is_slot(grad)  # of another gradient, or a parameter
    )


def _dispatches_in_python(tensor: Tensor) -> bool:
    """True for a subclass of which only its own code knows where the elements are."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _is_alone(grad: Tensor) -> bool:
    """True where a parameter's gradient is no other's too, and its memory is nobody else's."""
    # The parameter holds it, and so does the Python object asked here, however many names that has.
    held_once = grad._use_count() <= 2  # type: ignore[attr-defined]
    return held_once and owns_memory(grad) and not has_unnamed_aliases([grad])


def _replaced(states: bytes, loose: Sequence[int]) -> bytes:
    changed = bytearray(states)
    for i in loose:
        changed[i] = LOOSE
    return bytes(changed)


def _places_of(state: int, states: bytes) -> list[int]:
    return [i for i, found in enumerate(states) if found == state] if state in states else []


def _stretches(states: bytes) -> list[range]:
    """Maximal ranges of slots that are PRESENT."""
    return [range(*found.span()) for found in re.finditer(re.escape(bytes([PRESENT])) + b"+", states)]
