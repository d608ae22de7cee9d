# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of some parameters in one flat buffer.

Autograd, or the user, may put any tensor into ``param.grad``: ``gather`` copies it into its slot. What need not be
copied may be left where it is; ``grad_slots.py`` has the states that this makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.fusion import grad_slots
from apex_npu.fusion.flat_buffer import FlatBuffer, plan
from apex_npu.fusion.grad_slots import ABSENT, FOREIGN, LOOSE, PRESENT, GradSlots, LooseFor, dispatches_in_python
from apex_npu.fusion.layout import gaps_between
from apex_npu.fusion.many_tensors import are_same, increment_versions
from apex_npu.fusion.storage import SlotTable, slot_table
from apex_npu.ops import (
    LOW_PRECISION,
    gather_,
    gathers_in_one_pass,
    join_,
    joins_lists,
    take_grads_,
    takes_grads,
    unscale_grads,
)

# Gathered at once in pure torch: what has been copied is still in the cache when it is looked at.
_BATCH_NUMEL = 1 << 16
# So many tensors an NPU copies in one launch: joining pays where there are as many neighbours on average.
_JOINED_COUNT = 48
_GRAD, _DTYPE, _LAYOUT = attrgetter("grad"), attrgetter("dtype"), attrgetter("layout")


class FlatGrads:
    """Gradient slots of ``params``, laid out like the parameters themselves; memory is taken at first use.

    Attributes:
        params: Each has a slot, whether or not it ever gets a gradient.
        offsets: For each parameter, the elements before its slot's first.
        reads_lists: Whether a LOOSE gradient is one of a list that a rule takes, see ``gather_unless_listed``.
    """

    def __init__(self, params: Sequence[Tensor], offsets: Sequence[int], total_numel: int) -> None:
        """Plan only; ``params`` share dtype and device."""
        self.params = list(params)
        self.offsets = list(offsets)
        self.reads_lists = bool(self.params) and joins_lists(self.params[0].device)
        self._total_numel = total_numel
        self._largest_numel = max((p.numel() for p in self.params), default=0)
        self._buffer: FlatBuffer | None = None
        self._slots: GradSlots | None = None
        self._shapes: list[Tensor] = []
        self._views: list[Tensor] = []
        self._view_table: SlotTable | None = None
        self._padding: Tensor | None = None
        self._batched: tuple[list[int], list[range]] = ([], [])
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._table = slot_table(self.params)

    @classmethod
    def apart(cls, params: Sequence[Tensor]) -> FlatGrads:
        """Slots in the order of ``params``, wherever those lie; each has one of its own."""
        planned = plan([torch.empty_like(p, device="meta") for p in params])
        return cls(params, planned.offsets, planned.layout.total_numel)

    @property
    def device(self) -> torch.device:
        """Of all of them."""
        return self.params[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of the buffer."""
        return self.params[0].dtype

    def _plan_slots(self) -> GradSlots:
        if self._slots is None:
            # Shaped like what autograd makes: a parameter's strides where they are dense, else contiguous.
            self._shapes = [torch.empty_like(p, device="meta") for p in self.params]
            self._slots = grad_slots.grad_slots(self._shapes, self.offsets)
        return self._slots

    def _allocate(self) -> FlatBuffer:
        if self._buffer is None:
            slots = self._plan_slots()
            self._buffer = FlatBuffer(self._total_numel, self.dtype, self.device)
            self._views = self._buffer.views_like(self._shapes, self.offsets)
            self._view_table = slot_table(self._views)
            slots.remember_views(self._views)
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
        if self._buffer is None:
            return
        if self._padding is None:
            used = torch.zeros(self._total_numel, dtype=torch.bool)
            for param, offset in zip(self.params, self.offsets, strict=True):
                used[offset : offset + param.numel()] = True
            self._padding = (~used).nonzero().flatten().to(self.flat.device)
        self.flat.index_fill_(0, self._padding, 0.0)

    def states(self, slots: range | None = None) -> bytes:
        """One byte per parameter, of all or of those of ``slots``: ABSENT, PRESENT or FOREIGN."""
        return self._find(slots, LooseFor.NOTHING)

    def _find(self, slots: range | None, loose_for: LooseFor, loose_numel: int | None = None) -> bytes:
        if loose_numel is None:
            loose_numel = grad_slots.WRITTEN_NUMEL if loose_for == LooseFor.WRITING else grad_slots.LOOSE_NUMEL
        states = self._look(slots, loose_for, loose_numel)
        # The extension has seen in the same pass whether they lie where they did.
        lost = extension is None and PRESENT in states and self._replace_lost_views()
        return self._look(slots, loose_for, loose_numel) if lost else states

    def _look(self, slots: range | None, loose_for: LooseFor, loose_numel: int) -> bytes:
        params, views, first = self.params, self._views or self.params, 0
        if slots is not None:
            first = slots.start
            params, views = params[first : slots.stop], views[first : slots.stop]
        return self._plan_slots().states(params, views, first, loose_for, loose_numel)

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
        return range(first, last) if alike and are_same(tensors, self.params[first:last]) else None

    def all_present(self, slots: range | None = None) -> bool:
        """True where each of ``slots``, or of all, is PRESENT."""
        states = self.states(slots)
        return states.count(PRESENT) == len(states)

    def gather(self, slots: range | None = None, *, loose_for: LooseFor = LooseFor.NOTHING) -> bytes:
        """Bring every gradient into its slot: afterwards ``param.grad`` is None or the slot's view.

        Args:
            slots: Which; None: all.
            loose_for: But for those that may be worked on where they are.

        Returns:
            One byte per parameter, ABSENT or PRESENT, or LOOSE where it has been left.

        Raises:
            RuntimeError: A gradient is sparse, not of its parameter's dtype, or a subclass such as DTensor; nothing has
                been copied then.
        """
        return self._gather(slots, self._find(slots, loose_for))

    def gather_unless_listed(self) -> bytes:
        """``gather``, but where a rule can take all gradients as a list, each is LOOSE that is outside of its slot.

        Only where it ``reads_lists``. All must have their slot's dtype and layout for that.
        """
        states = self._find(None, LooseFor.NOTHING)
        foreign = _places_of(FOREIGN, states)
        grads = map(_GRAD, map(self.params.__getitem__, foreign))
        if all(map(grad_slots.fits, grads, map(self._shapes.__getitem__, foreign))):
            return states.replace(bytes([FOREIGN]), bytes([LOOSE]))
        return self._gather(None, states)

    def _gather(self, slots: range | None, states: bytes) -> bytes:
        if FOREIGN not in states:
            return states
        first, views = 0 if slots is None else slots.start, self.views
        if PRESENT not in states and gathers_in_one_pass(self.params[0]):
            all_of_them = slots is None and LOOSE not in states
            self.take(self.params, slots=None if all_of_them else _places_of(FOREIGN, states, first))
        else:
            foreign = _places_of(FOREIGN, states, first)
            params, slots_of_them = ([tensors[i] for i in foreign] for tensors in (self.params, views))
            self._copy_in(foreign, slots_of_them, self._readable(foreign, list(map(_GRAD, params)), self.params))
            _set_grads(params, slots_of_them)
        return states.replace(bytes([FOREIGN]), bytes([PRESENT]))

    def gather_times(self, factor: float, slots: range) -> bytes:
        """``gather(slots)``, then multiply what lies there by ``factor``; in one pass where the device allows."""
        states = self.states(slots)
        if PRESENT not in states and FOREIGN in states and gathers_in_one_pass(self.params[0]):
            self.take(self.params, factor, slots=slots)
            return states.replace(bytes([FOREIGN]), bytes([PRESENT]))
        states = self.gather(slots)
        if factor != 1.0 and PRESENT in states:
            self.span(slots).mul_(factor)
        return states

    def take(
        self,
        sources: Sequence[Tensor],
        inv_scale: float = 1.0,
        found_inf: Tensor | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Multiply the gradients of ``sources`` in one pass, and bring them into the slots; see ``ops.take_grads_``.

        Args:
            sources: Where the gradients of ``params`` are now: one for each.
            inv_scale: 1 / loss scale.
            found_inf: As of ``unscale_``.
            slots: Which; None: all.

        Raises:
            RuntimeError: A gradient is sparse, not of its parameter's dtype, or a subclass such as DTensor; nothing has
                been copied then.
        """
        views = self.views
        taken = range(len(self.params)) if slots is None else slots
        if not gathers_in_one_pass(self.params[0]):
            self._take_batches(sources, views, taken, inv_scale, found_inf)
            return
        given, params = sources, self.params
        if slots is not None:
            given, params, views = ([tensors[i] for i in slots] for tensors in (given, params, views))
        unfit = take_grads_(given, params, views, inv_scale, found_inf)
        if unfit is not None:
            source, param = sources[taken[unfit]], self.params[taken[unfit]]
            self._check_grad(taken[unfit], source.grad, own=source is param)

    def share(self, sources: Sequence[Tensor]) -> None:
        """Bring the gradients of ``sources`` to ``params``, without a copy where they can be read where they are.

        Then both have a gradient of the source's dtype, in one memory until either is written; ``gather`` makes it one
        of the parameter's dtype.

        Raises:
            RuntimeError: As of ``take``.
        """
        others: Sequence[int] = range(len(self.params))
        if self.device.type == "cpu" and self._largest_numel >= grad_slots.WRITTEN_NUMEL:
            others = self._plan_slots().share(sources, self.params, grad_slots.WRITTEN_NUMEL)
        if others:
            self.take(sources, slots=None if len(others) == len(self.params) else others)

    def unscale_(self, inv_scale: float, found_inf: Tensor | None) -> None:
        """Multiply all gradients, where they are or on their way into their slots.

        None shares its memory with another afterwards, so that the next backward may add to them, too.

        Args:
            inv_scale: 1 / loss scale.
            found_inf: float32, one element; set to 1 where a gradient is not finite. None: do not look.

        Raises:
            RuntimeError: As of ``gather``.
        """
        if inv_scale == 1.0 and found_inf is None:
            self._gather(None, self._find(None, LooseFor.WRITING, grad_slots.LOOSE_NUMEL))
            return
        states = self._find(None, LooseFor.WRITING)
        in_one_call = LOOSE in states and self.reads_in_place
        if FOREIGN in states and PRESENT not in states and not in_one_call and takes_grads(self.params[0]):
            self.take(self.params, inv_scale, found_inf, _places_of(FOREIGN, states) if LOOSE in states else None)
            states = states.replace(bytes([FOREIGN]), bytes([ABSENT]))  # nothing is left to do there
        operands = self._operands(self._gather(None, states))
        unscale_grads(operands, inv_scale, found_inf)
        if inv_scale != 1.0:
            increment_versions(operands)

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
        slots_of_them = [views[i] for i in there]
        grads = self._readable(there, [given[i] for i in there], sources)
        if joins_lists(self.device):
            self._copy_in(there, slots_of_them, grads)
            unscale_grads(list(map(self.span, self._batches(there))), inv_scale, found_inf)
        else:
            for batch, begin, end in _numbered(self._batches(there)):
                gather_(slots_of_them[begin:end], grads[begin:end])
                unscale_grads([self.span(batch)], inv_scale, found_inf)
        _set_grads([self.params[i] for i in there], slots_of_them)

    def _copy_in(self, indices: list[int], views: list[Tensor], grads: list[Tensor]) -> None:
        """Copy ``grads`` into the slots ``indices``, which have these ``views``."""
        batches = self._batches(indices) if joins_lists(self.device) else []
        if not batches or len(batches) * _JOINED_COUNT > len(indices) + _JOINED_COUNT:
            gather_(views, grads)
            return
        rows = self._rows(indices, grads)
        for batch, begin, end in _numbered(batches):
            offsets = self.offsets[batch.start : batch.stop]
            gaps = gaps_between(offsets, [row.numel() for row in rows[begin:end]])
            stretch = self.flat[offsets[0] : offsets[-1] + rows[end - 1].numel()]
            join_(stretch, rows[begin:end], gaps, self._zeros_of(rows[begin].dtype, max(gaps)))

    def _rows(self, indices: list[int], grads: list[Tensor]) -> list[Tensor]:
        """``grads``, 1-D, with the elements in the order that those of the slots ``indices`` have in memory."""
        shapes = [self._shapes[i] for i in indices]
        in_order = [
            a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())
            for a, b in zip(grads, shapes, strict=True)
        ]
        if not all(in_order):
            grads = [
                grad if alike else torch.empty_like(shape, device=grad.device).copy_(grad)
                for grad, shape, alike in zip(grads, shapes, in_order, strict=True)
            ]
        return [grad.detach().as_strided((grad.numel(),), (1,)) for grad in grads]

    def _zeros_of(self, dtype: torch.dtype, numel: int) -> Tensor:
        zeros = self._zeros.get(dtype)
        if zeros is None or zeros.numel() < numel:
            zeros = self._zeros[dtype] = FlatBuffer(numel, dtype, self.device).flat
        return zeros

    def _batches(self, indices: list[int]) -> list[range]:
        """Neighbours among ``indices``, so many as are worth a call."""
        if self._batched[0] != indices:
            most = self._total_numel if joins_lists(self.device) else _BATCH_NUMEL
            found = []
            begin = 0
            for k in range(1, len(indices) + 1):
                first = indices[begin]
                if (
                    k == len(indices)
                    or indices[k] != indices[k - 1] + 1
                    or self.offsets[indices[k]] - self.offsets[first] >= most
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

    @property
    def reads_in_place(self) -> bool:
        """True where kernels read gradients where they lie, all in one call."""
        return extension is not None and self.device.type == "cpu"

    def operand(self, slots: range, numel: int, *, stepped: bool = False) -> Tensor:
        """The gradients of consecutive ``slots``, where one is LOOSE at least and none FOREIGN, for ``ops`` to read.

        1-D, of ``numel`` elements from the first slot's on. It may have no memory: nothing but ops can read it then. In
        pure torch it is one slot. Those that are ``stepped`` are not LOOSE for STEPPING any more.
        """
        return self._plan_slots().place(self.params[slots.start : slots.stop], slots.start, numel, stepped)

    def _operand_of(self, index: int) -> Tensor:
        return self.operand(range(index, index + 1), self.params[index].numel())

    def forget_stepped(self) -> None:
        """Gradients have been dropped: those to come are others."""
        if self._slots is not None:
            self._slots.forget_stepped()

    def operands(self, loose_for: LooseFor) -> list[Tensor]:
        """All gradients in few pieces, 1-D: ``operand`` or what is LOOSE, and stretches of the buffer with padding.

        Args:
            loose_for: READING, by ``ops``; or WRITING, by ``ops.multiply_``, which can write what they can read.
        """
        return self._operands(self.gather(loose_for=loose_for))

    def _operands(self, states: bytes) -> list[Tensor]:
        if LOOSE in states and self.reads_in_place:
            return [self.operand(range(len(self.params)), self._total_numel)]
        spans = [self.span(slots) for slots in _stretches(states)]
        return [self._operand_of(i) for i in _places_of(LOOSE, states)] + spans

    def gathered(self) -> list[Tensor]:
        """All gradients, gathered: stretches of the buffer, padding included."""
        return [self.span(slots) for slots in _stretches(self.gather())]

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
        narrow = param.dtype == torch.float32 and grad.dtype in LOW_PRECISION
        if own and grad.dtype != param.dtype and not narrow:
            raise RuntimeError(
                f"parameter {index} of shape {tuple(param.shape)} is {param.dtype} and has a gradient in {grad.dtype}, "
                "which cannot be fused; leave its grad_dtype as it was, or use the unfused optimizer"
            )
        if dispatches_in_python(grad):
            raise RuntimeError(
                f"parameter {index} of shape {tuple(param.shape)} is a plain tensor and has a {type(grad).__name__} as "
                "gradient, which cannot be fused; give it a plain tensor (of a DTensor its full_tensor()), or None"
            )


def _set_grads(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def _numbered(batches: Sequence[range]) -> Iterator[tuple[range, int, int]]:
    """Each, with where its members begin and end in a list of all members."""
    end = 0
    for batch in batches:
        begin, end = end, end + len(batch)
        yield batch, begin, end


def _places_of(state: int, states: bytes, first: int = 0) -> list[int]:
    return [i for i, found in enumerate(states, first) if found == state] if state in states else []


def _stretches(states: bytes) -> list[range]:
    """Maximal ranges of slots that are PRESENT."""
    return [range(*found.span()) for found in re.finditer(re.escape(bytes([PRESENT])) + b"+", states)]
