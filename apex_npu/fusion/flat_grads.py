# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of some parameters in one flat buffer.

A slot is ABSENT while ``param.grad is None``, as ``zero_grad()`` leaves it, and PRESENT while ``param.grad`` is the
slot's view. Autograd, or the user, may put any other tensor there: ``gather`` copies it into the slot. Large ones may
as well stay where they are (LOOSE), for whoever can work on several pieces: on a CPU copying one costs half as much as
its step of Adam, and a call of its own next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from apex_npu.fusion.flat_buffer import FlatBuffer, plan
from apex_npu.fusion.many_tensors import increment_versions
from apex_npu.fusion.storage import SlotTable, grad_states, has_unnamed_aliases, is_slot, owns_memory, slot_table
from apex_npu.ops import gather_, gathers_in_one_pass, take_grads_, unscale_grads

ABSENT, PRESENT, FOREIGN, LOOSE = 0, 1, 2, 3
# From how many elements on.
LOOSE_NUMEL = 1 << 18


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
        self._replace_lost_views()
        views = self._views or self.params
        if slots is None:
            return grad_states(self.params, views)
        return grad_states(self.params[slots.start : slots.stop], views[slots.start : slots.stop])

    def _replace_lost_views(self) -> None:
        """``p.grad.data = ...`` takes a view out of its slot: from then on it is a gradient like any other."""
        if self._buffer is None or self._view_table is None:
            return
        for i in self._view_table.broken(self._views):
            self._views[i] = self._buffer.view(self.offsets[i], self._shapes[i].size(), self._shapes[i].stride())

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

    def all_present(self, slots: range) -> bool:
        """True where each of ``slots`` is PRESENT."""
        return self.states(slots).count(PRESENT) == len(slots)

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
        first = 0 if slots is None else slots.start
        states = self.states(slots)
        if FOREIGN not in states:
            return states
        loose = [i for i in self._large if states[i] == FOREIGN and self._fits(i)] if leave_large else []
        if to_be_written:
            loose = self._unshared(loose)
        if loose:
            states = _replaced(states, loose)
        if PRESENT not in states and gathers_in_one_pass(self.flat):
            self._take(self.params, range(first, first + len(states)), loose, 1.0, None)
        else:
            foreign = [i for i, state in enumerate(states, first) if state == FOREIGN]
            grads = [self.grad_of(i) for i in foreign]
            # One may lie in another's slot, which is about to be written.
            gather_([self.views[i] for i in foreign], [g.clone() if is_slot(g) else g for g in grads])
            for i in foreign:
                self.params[i].grad = self.views[i]
        return states.replace(bytes([FOREIGN]), bytes([PRESENT]))

    def gather_times(self, factor: float, slots: range) -> bytes:
        """``gather(slots)``, then multiply what lies there by ``factor``; in one pass where the device allows."""
        states = self.states(slots)
        if PRESENT not in states and FOREIGN in states and gathers_in_one_pass(self.flat):
            self._take(self.params, slots, [], factor, None)
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
        loose = self._unshared([i for i in self._large if sources[i] is self.params[i] and self._fits(i)])
        self._take(sources, range(len(self.params)), loose, inv_scale, found_inf)
        in_place = [self.loose(i) for i in loose]
        unscale_grads(in_place, inv_scale, found_inf)
        if inv_scale != 1.0:
            increment_versions(in_place)

    def _take(
        self, sources: Sequence[Tensor], slots: range, but: list[int], inv_scale: float, found_inf: Tensor | None
    ) -> None:
        left = set(but)
        indices: Sequence[int] = [i for i in slots if i not in left] if left else slots

        def among(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [tensors[i] for i in indices] if left else tensors[slots.start : slots.stop]

        unfit = take_grads_(among(sources), among(self.params), among(self.views), inv_scale, found_inf)
        if unfit is not None:
            self._check_grad(indices[unfit], sources[indices[unfit]].grad)

    def _fits(self, index: int) -> bool:
        """True where the gradient of parameter ``index`` has its slot's dtype and layout, and memory of its own."""
        grad, view = self.params[index].grad, self.views[index]
        return (
            grad is not None
            and grad.layout == torch.strided
            and not _dispatches_in_python(grad)
            and not grad.requires_grad  # create_graph=True: writing it would falsify its graph
            and grad.dtype == view.dtype
            and grad.stride() == view.stride()
            and not is_slot(grad)  # of another gradient, or a parameter
        )

    def _unshared(self, indices: list[int]) -> list[int]:
        """Those whose gradient nobody else looks at, so that it may be written.

        Two gradients, of this buffer or of another, can be views of one tensor: autograd leaves them so for
        ``a.view(-1) + b.view(-1)``. Or they are one tensor, which a user has given to both.
        """
        return [i for i in indices if (grad := self.params[i].grad) is not None and _is_alone(grad)]

    def loose(self, index: int) -> Tensor:
        """The gradient of parameter ``index``, which fits, as one piece."""
        grad = self.grad_of(index)
        return grad.as_strided((grad.numel(),), (1,))

    def pieces(self) -> tuple[list[Tensor], list[Tensor]]:
        """All gradients in few pieces, 1-D: those that are LOOSE, and stretches of the buffer, padding included."""
        states = self.gather(leave_large=True, to_be_written=True)
        loose = [self.loose(i) for i, state in enumerate(states) if state == LOOSE]
        return loose, [self.span(slots) for slots in _stretches(states)]

    def mask(self) -> Tensor:
        """float32, 1-D: one where a gradient is PRESENT, zero in padding and in ABSENT slots."""
        states = self.gather()
        mask = torch.zeros_like(self.flat, dtype=torch.float32)
        for view, offset, state in zip(self.views, self.offsets, states, strict=True):
            if state == PRESENT:
                mask[offset : offset + view.numel()] = 1.0
        return mask

    def grad_of(self, index: int) -> Tensor:
        """The gradient of parameter ``index``, which must have one.

        Raises:
            RuntimeError: It is sparse, of another dtype, or a subclass such as DTensor.
        """
        grad = self.params[index].grad
        assert grad is not None
        self._check_grad(index, grad)
        return grad.detach()

    def _check_grad(self, index: int, grad: Tensor | None) -> None:
        param = self.params[index]
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"parameter {index} of shape {tuple(param.shape)} has a sparse gradient ({grad.layout}), which cannot "
                "be fused; use a layer with sparse=False, or torch.optim.SparseAdam or SGD for it"
            )
        if grad.dtype != param.dtype:
            raise RuntimeError(
                f"parameter {index} of shape {tuple(param.shape)} is {param.dtype} and has a gradient in {grad.dtype}, "
                "which cannot be fused; leave its grad_dtype as it was, or use the unfused optimizer"
            )
        if _dispatches_in_python(grad):
            raise RuntimeError(
                f"parameter {index} of shape {tuple(param.shape)} is a plain tensor and has a {type(grad).__name__} as "
                "gradient, which cannot be fused; give it a plain tensor (of a DTensor its full_tensor()), or None"
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


def _stretches(states: bytes) -> list[range]:
    """Maximal ranges of slots that are PRESENT."""
    found: list[range] = []
    begin = None
    for i, state in enumerate((*states, ABSENT)):
        if state == PRESENT and begin is None:
            begin = i
        elif state != PRESENT and begin is not None:
            found.append(range(begin, i))
            begin = None
    return found
