# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of some parameters in one flat buffer.

Autograd, or the user, may put any tensor into ``param.grad``: ``gather`` copies it into its slot. What need not be
copied may be left where it is; ``grad_slots.py`` has the states that this makes, ``grad_memory.py`` the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.backends import is_capturing
from apex_npu.backends._torch_private import no_grad
from apex_npu.fusion import grad_slots, packed_grads
from apex_npu.fusion.addressed_grads import AddressedGrads
from apex_npu.fusion.combined import check_combinable
from apex_npu.fusion.flat_buffer import plan
from apex_npu.fusion.grad_copier import GradCopier
from apex_npu.fusion.grad_memory import GradMemory
from apex_npu.fusion.grad_slots import (
    ELSEWHERE,
    IN_BUFFER,
    NONE,
    InPlace,
    check_grad,
    places_of,
    stay_elsewhere,
    stretches,
    with_state,
)
from apex_npu.fusion.many_tensors import are_same, increment_versions
from apex_npu.fusion.storage import SlotTable
from apex_npu.ops import (
    cats_lists,
    gathers_in_one_pass,
    reads_listed,
    takes_addresses,
    takes_grads,
    unscale_grads,
)

_GRAD = attrgetter("grad")


class FlatGrads:
    """Gradient slots of ``params``, laid out like the parameters themselves; memory is taken at first use.

    Attributes:
        params: Each has a slot, whether or not it ever gets a gradient.
        full_params: Whose gradients users see: ``params``, or sharded parameters, of which these are this process's
            parts.
        is_sharded: It is the latter.
        offsets: For each parameter, the elements before its slot's first.
        total_numel: Of the buffer.
        reads_lists: Whether gradients that are ELSEWHERE can be a list that a rule takes, see ``gather_unless_listed``.
        reads_in_place: Kernels read gradients that are ELSEWHERE in place, all in one call.
        is_shown: A script has the buffer: gradients are always copied there, and padding may have been written.
        gathers_all: Gradients are always copied into slots: a CUDA graph has their addresses, or no kernel follows any.
        may_pack: See ``pack``.
        is_packed: Gradients have been packed, and some may still be.
        is_widened: Slots are float32, and parameters have 16 bits.
        memory: The buffer, and the views of its slots.
    """

    is_sharded = False
    gathers_all = False
    may_pack = False
    is_packed = False
    is_widened = False

    def __init__(self, params: Sequence[Tensor], offsets: Sequence[int], total_numel: int) -> None:
        """Plan only; ``params`` share dtype and device."""
        self.params = self.full_params = list(params)
        self.offsets = list(offsets)
        self.reads_lists = bool(self.params) and cats_lists(self.params[0].device)
        self.reads_in_place = bool(self.params) and reads_listed(self.params[0])
        self.is_shown = False
        self._in_one_pass = bool(self.params) and gathers_in_one_pass(self.params[0])
        self.total_numel = total_numel
        self._largest_numel = max((p.numel() for p in self.params), default=0)
        self.memory = GradMemory(self.params, self.offsets, total_numel)
        self._copier: GradCopier | None = None
        self._addressed = AddressedGrads(self.memory) if self.params and takes_addresses(self.params[0]) else None
        self._table = SlotTable(self.params)

    def widen(self) -> None:
        """Have float32 slots for gradients of 16-bit parameters, before there is any memory."""
        self.is_widened = True
        lends = self.memory.lends
        self.memory = GradMemory(self.params, self.offsets, self.total_numel, torch.float32)
        self.memory.lends = lends
        if self._addressed is not None:
            self._addressed = AddressedGrads(self.memory)

    @classmethod
    def apart(cls, params: Sequence[Tensor]) -> FlatGrads:
        """Slots in the order of ``params``, one for each, independent of where the parameters are in memory."""
        planned = plan([torch.empty_like(p, device="meta") for p in params])
        return cls(params, planned.offsets, planned.layout.total_numel)

    @property
    def device(self) -> torch.device:
        """Of all of them."""
        return self.params[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of the buffer."""
        return self.memory.shapes[0].dtype

    def _allocate(self, *, pads: bool = False) -> Tensor:
        if self.memory.is_lent:
            self._take_up()
        return self.memory.allocate(pads=pads)

    def _take_up(self) -> None:
        self.memory.take_up()

    @property
    def has_buffer(self) -> bool:
        """Whether there is memory for gradients."""
        if self.memory.is_lent:
            self._take_up()
        return bool(self.memory.views)

    @property
    def flat(self) -> Tensor:
        """All slots and their padding, which is zero. Slots that are NONE hold whatever was there last."""
        return self._allocate()

    def show(self) -> Tensor:
        """``flat`` for a script, to read and to write: all gradients are there, with zeros for those that are None.

        Raises:
            RuntimeError: As of ``gather``; or it is the first time, and a CUDA graph is being captured.
        """
        if not self.is_shown:
            check_combinable()
            self.memory.find_padding()
        states = self.gather()
        self.is_shown, self.memory.lends = True, False
        if NONE in states:
            views = self.views
            torch._foreach_zero_([views[i] for i in places_of(NONE, states)])
        self.memory.clear_padding()
        return self.flat

    @property
    def views(self) -> list[Tensor]:
        """One per parameter, shaped like it, for a new gradient to be written.

        A former gradient that something still holds (PCGrad keeps ``p.grad`` of each task) moves out of its slot first.
        """
        memory = self.memory
        if not memory.views or not memory.is_padded:
            self._allocate()
        if any(extension.lost_and_kept(memory.view_table, memory.views, self.params)):
            memory.free_views()
        if self.is_shown:
            memory.clear_padding()
        return memory.views

    def states(self, slots: range | None = None) -> bytes:
        """One byte per parameter, of all or of those of ``slots``: NONE, IN_BUFFER or ELSEWHERE."""
        return self._find(slots, InPlace.NO)[0]

    def _find(self, slots: range | None, in_place: InPlace, least_numel: int | None = None) -> tuple[bytes, list[int]]:
        """The states of ``slots``, and those of them whose gradients have to be gathered; see ``GradSlots.states``."""
        if self.memory.is_lent:
            self._take_up()
        if in_place == InPlace.WRITE:
            self.is_packed = False  # those are gathered; what stays, to be written there, is not one of them
        elif self.is_packed and in_place == InPlace.READ and not self.is_shown:
            packed = self._find_packed()
            if packed is not None:
                return packed if slots is None else packed[slots.start : slots.stop], []
        if self.is_shown or self.gathers_all or (self._addressed is not None and is_capturing()):
            in_place = InPlace.NO  # a replay would follow the addresses of the capture
        if least_numel is None:
            multiplied = in_place == InPlace.WRITE and self._addressed is None
            least_numel = grad_slots.WRITTEN_NUMEL if multiplied else grad_slots.STAYS_NUMEL
        params, views, first = self.params, self.memory.views or self.params, 0
        if slots is not None:
            first = slots.start
            params, views = params[first : slots.stop], views[first : slots.stop]
        return self.memory.slots.states(params, views, first, in_place, least_numel)

    def broken(self) -> list[int]:
        """Indices of the parameters that no longer have the address, shape, dtype or device they were planned with."""
        return self._table.broken(self.params)

    def span(self, slots: range) -> Tensor:
        """The memory of consecutive ``slots``, padding included."""
        begin = self.offsets[slots.start]
        return self.flat[begin : begin + self._span_numel(slots)]

    def _span_numel(self, slots: range) -> int:
        end = self.offsets[slots.stop] if slots.stop < len(self.offsets) else self.total_numel
        return end - self.offsets[slots.start]

    def slots_of(self, tensors: Sequence[Tensor], offsets: Sequence[int]) -> range | None:
        """The consecutive slots of the gradients of ``tensors``, spaced as ``offsets`` are; None: there are none."""
        first = next((i for i, p in enumerate(self.params) if p is tensors[0]), None)
        if first is None:
            return None
        last = first + len(tensors)
        apart = [offset - self.offsets[first] for offset in self.offsets[first:last]]
        alike = len(apart) == len(offsets) and apart == [offset - offsets[0] for offset in offsets]
        return range(first, last) if alike and are_same(tensors, self.params[first:last]) else None

    def all_present(self, slots: range | None = None) -> bool:
        """True where each of ``slots``, or of all, is IN_BUFFER."""
        states = self.states(slots)
        return states.count(IN_BUFFER) == len(states)

    def gather(self, slots: range | None = None, *, in_place: InPlace = InPlace.NO) -> bytes:
        """Bring every gradient into its slot: afterwards ``param.grad`` is None or the slot's view.

        Args:
            slots: Which; None: all.
            in_place: But for those that may be worked on where they are.

        Returns:
            One byte per parameter: NONE, IN_BUFFER, or ELSEWHERE where it has been left.

        Raises:
            RuntimeError: A gradient is sparse, not of its parameter's dtype, or a subclass such as DTensor; nothing has
                been copied then.
        """
        at_once = self._addressed and in_place == InPlace.NO and not self.is_sharded and self.has_buffer
        if at_once and (taken := self._take_by_address(self.params, slots)) is not None:
            return taken
        states, to_gather = self._find(slots, in_place)
        return self._gather(slots, states, to_gather) if to_gather else states

    def gather_unless_listed(self) -> bytes:
        """``gather``, but where a rule can take all gradients as a list, those that are ELSEWHERE stay there.

        Only where it ``reads_lists``. All must have their slot's dtype and layout for that.
        """
        if self.is_packed:
            return self.gather(in_place=InPlace.READ)
        states, to_gather = self._find(None, InPlace.NO)
        grads = map(_GRAD, map(self.params.__getitem__, to_gather))
        fit = all(map(grad_slots.fits, grads, map(self.memory.shapes.__getitem__, to_gather)))
        return states if fit else self._gather(None, states, to_gather)

    def _gather(self, slots: range | None, states: bytes, to_gather: list[int]) -> bytes:
        if self._addressed:
            stay = stay_elsewhere(states, to_gather)
            taken = self._take_by_address(self.params, to_gather if stay else slots)
            if taken is not None:
                return with_state(IN_BUFFER, states, to_gather, 0 if slots is None else slots.start)
        if IN_BUFFER not in states and self._in_one_pass:
            all_of_them = slots is None and not stay_elsewhere(states, to_gather)
            self.take(self.params, slots=None if all_of_them else to_gather)
        else:
            params = [self.params[i] for i in to_gather]
            grads = self.memory.readable(to_gather, list(map(_GRAD, params)), self.params)
            extension.set_grads(params, self._copy_in(to_gather, grads))
        if slots is None:
            self.is_packed = False
        return with_state(IN_BUFFER, states, to_gather, 0 if slots is None else slots.start)

    def _copy_in(self, indices: list[int], grads: list[Tensor]) -> list[Tensor]:
        """Copy ``grads`` into the slots ``indices``, whose views are returned."""
        pads = self.reads_lists and len(indices) == len(self.params)  # then zeros are copied along
        self._allocate(pads=pads)
        views = self.memory.views if pads and not self.memory.is_padded else self.views
        slots_of_them = [views[i] for i in indices]
        self._make_copier().copy_in(indices, slots_of_them, grads)
        self.memory.is_padded = True  # last: what is interrupted above leaves padding to the next use
        return slots_of_them

    def gather_times(self, factor: float, slots: range) -> bytes:
        """``gather(slots)``, then multiply these gradients by ``factor``; in one pass where the device allows."""
        states, to_gather = self._find(slots, InPlace.NO)
        if to_gather and IN_BUFFER not in states and (self._in_one_pass or self._addressed):
            self.take(self.params, factor, slots=slots)
            return with_state(IN_BUFFER, states, to_gather, slots.start)
        states = self.gather(slots)
        if factor != 1.0 and IN_BUFFER in states:
            self.span(slots).mul_(factor)
        return states

    def take(
        self,
        sources: Sequence[Tensor],
        inv_scale: float = 1.0,
        found_inf: Tensor | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Multiply the gradients of ``sources`` in one pass, and copy those that are there into the slots.

        Args:
            sources: Where the gradients of ``params`` are now: one for each.
            inv_scale: 1 / loss scale.
            found_inf: As of ``unscale_``.
            slots: Which; None: all.

        Raises:
            RuntimeError: A gradient is sparse, not of its parameter's dtype, or a subclass such as DTensor; nothing has
                been copied then.
        """
        if self._addressed and self._take_by_address(sources, slots, inv_scale, found_inf) is not None:
            return
        taken = range(len(self.params)) if slots is None else slots
        if not self._in_one_pass:
            self._take_batches(sources, taken, inv_scale, found_inf)
            return
        given, params, views = sources, self.params, self.views
        if slots is not None:
            given, params, views = ([tensors[i] for i in slots] for tensors in (given, params, views))
        unfit = extension.take_grads_cpu(given, params, views, inv_scale, found_inf)
        if unfit is not None:
            index = taken[unfit]
            grad = sources[index].grad
            check_grad(index, self.params[index], grad, self.dtype, own=sources[index] is self.params[index])
            raise RuntimeError(f"parameter {index} has a gradient that cannot be fused: {grad!r}")

    def _take_by_address(
        self,
        sources: Sequence[Tensor],
        slots: Sequence[int] | None,
        inv_scale: float = 1.0,
        found_inf: Tensor | None = None,
    ) -> bytes | None:
        """``take`` by a kernel that follows addresses; where ``slots`` is None it multiplies what is in slots, too.

        Returns:
            The states of the slots afterwards. None, with nothing done, where the kernel does not compile; or in the
            capture of a CUDA graph, whose replay would follow the addresses of the capture.
        """
        if self._addressed is None or is_capturing():
            return None
        flat = self.flat
        if self.is_shown:
            self.memory.clear_padding()
        taken = self._addressed.take(flat, sources, slots, inv_scale, found_inf)
        if taken is None:
            self._addressed, self.gathers_all = None, True
            return None
        states, apart = taken
        if apart:
            self._unscale_operands(states, inv_scale, found_inf)
        if slots is None:
            self.is_packed = False
        return states

    @property
    def shares_lazily(self) -> bool:
        """What is in one memory after ``share`` is copied when it is first written."""
        return self.device.type == "cpu" and self._addressed is None

    def share(self, sources: Sequence[Tensor]) -> None:
        """Bring the gradients of ``sources`` to ``params``, without a copy where they can be read where they are.

        Then both have a gradient of the source's dtype, in one memory; on a CPU until either is written. ``gather``
        makes it one of the parameter's dtype. Where none can be read, all are packed, if they can be.

        Raises:
            RuntimeError: As of ``take``.
        """
        slots, lazily = self.memory.slots, self.shares_lazily
        least_numel = grad_slots.WRITTEN_NUMEL if lazily else grad_slots.STAYS_NUMEL
        reads = lazily or (self._addressed is not None and not is_capturing())
        shared, others = False, list[int]()
        if reads and self._largest_numel >= least_numel and not (self.is_shown or self.gathers_all):
            shared, others = slots.share(sources, self.params, least_numel, lazily)
        if shared and others:
            self.take(sources, slots=others)
        elif not shared and not self.pack(sources):
            self.take(sources)

    @no_grad
    def pack(self, sources: Sequence[Tensor]) -> bool:
        """Copy the gradients of ``sources`` to ``params`` as views of one tensor of their own dtype, on any device.

        The sources have these views as gradients, too, so that the memory of their former ones is free. Only ``ops``
        can read the tensor in the place of the buffer; ``gather`` makes gradients of the parameters' dtype.

        Returns:
            False, with nothing changed, where that is not possible, or would save too little memory.
        """
        if not self.may_pack or self.is_shown or self.total_numel < packed_grads.PACKED_NUMEL:
            return False
        memory = self.memory
        self.is_packed = packed_grads.pack_grads(
            sources, self.params, memory.slots, memory.shapes, self.offsets, self.total_numel
        )
        return self.is_packed

    def _find_packed(self) -> bytes | None:
        """The states, where all gradients that are there are packed; else None, until ``pack`` is called again."""
        slots: Any = self.memory.slots
        found: bytes | None = slots.packed_states(self.params, self.total_numel)
        self.is_packed = found is not None
        return found

    def _packed_operand(self, slots: range, numel: int) -> Tensor:
        grad = self.params[slots.start].grad
        assert grad is not None
        flat = self.flat if grad.dtype == self.dtype else packed_grads.packed_in(grad)
        return flat[self.offsets[slots.start] : self.offsets[slots.start] + numel]

    def unscale_(self, inv_scale: float, found_inf: Tensor | None) -> None:
        """Multiply all gradients, where they are or on their way into their slots.

        None shares its memory with another afterwards, so that the next backward may add to them, too.

        Args:
            inv_scale: 1 / loss scale.
            found_inf: float32, one element; set to 1 where a gradient is not finite. None: do not look.

        Raises:
            RuntimeError: As of ``gather``.
        """
        slots, views = self.memory.slots, self.memory.views
        at_once = self._in_one_pass and inv_scale != 1.0 and views and not self.is_shown
        if not at_once or not slots.unscale(self.params, views, inv_scale, found_inf, grad_slots.WRITTEN_NUMEL):
            self._unscale_any(inv_scale, found_inf)
        self.is_packed = False

    @no_grad
    def _unscale_any(self, inv_scale: float, found_inf: Tensor | None) -> None:
        """``unscale_`` in several steps, on any device and of any gradients."""
        if inv_scale == 1.0 and found_inf is None:
            states, to_gather = self._find(None, InPlace.WRITE, grad_slots.STAYS_NUMEL)
            if to_gather:
                self._gather(None, states, to_gather)
            return
        states, to_gather = self._find(None, InPlace.WRITE)
        stay = stay_elsewhere(states, to_gather)
        in_one_call = stay and self.reads_in_place
        if to_gather and IN_BUFFER not in states and not in_one_call and takes_grads(self.params[0]):
            self.take(self.params, inv_scale, found_inf, to_gather if stay else None)
            states = with_state(NONE, states, to_gather)  # nothing is left to do there
        elif to_gather:
            states = self._gather(None, states, to_gather)
        self._unscale_operands(states, inv_scale, found_inf)

    def _unscale_operands(self, states: bytes, inv_scale: float, found_inf: Tensor | None) -> None:
        operands = self._operands(states)
        unscale_grads(operands, inv_scale, found_inf)
        if inv_scale != 1.0:
            increment_versions(operands)

    def _make_copier(self) -> GradCopier:
        if self._copier is None:
            flat, memory = self._allocate(pads=True), self.memory
            self._copier = GradCopier(flat, self.offsets, memory.shapes, pads=memory.lends)
        return self._copier

    @torch.no_grad()
    def _take_batches(
        self,
        sources: Sequence[Tensor],
        indices: Sequence[int],
        inv_scale: float,
        found_inf: Tensor | None,
    ) -> None:
        """``take`` where no kernel does all of it in one pass."""
        given = list(map(_GRAD, sources))
        there = [i for i in indices if given[i] is not None]
        if not there:
            return
        grads = self.memory.readable(there, [given[i] for i in there], sources)
        slots_of_them = self._copy_in(there, grads)
        unscale_grads(list(map(self.span, self._make_copier().batches(there))), inv_scale, found_inf)
        extension.set_grads([self.params[i] for i in there], slots_of_them)

    def operand(self, slots: range, numel: int, *, stepped: bool = False) -> Tensor:
        """The gradients of consecutive ``slots``, where none has to be gathered, for ``ops`` to read.

        1-D, of ``numel`` elements from the first slot's on. It may have no memory: nothing but ops can read it then.
        Those that are ``stepped`` have to be gathered for a second step.
        """
        if self.is_packed:
            return self._packed_operand(slots, numel)
        listed = self.memory.slots.grad_list(self.params[slots.start : slots.stop], slots.start, numel, stepped)
        if self._addressed is not None:
            self._addressed.add_addresses(listed, slots)
        return listed

    def _operand_of(self, index: int) -> Tensor:
        return self.operand(range(index, index + 1), self.params[index].numel())

    def forget_stepped(self) -> None:
        """Gradients have been dropped: those to come are others."""
        self.memory.slots.forget_stepped()

    def operands(self, in_place: InPlace) -> list[Tensor]:
        """All gradients in few pieces, 1-D: ``operand`` or what is ELSEWHERE, and stretches of the buffer with padding.

        Args:
            in_place: READ, by ``ops``; or WRITE, by ``ops.multiply_``, which can write what they can read.
        """
        states = self.gather(in_place=in_place)
        # Those in slots can be listed, too: then nothing is written to padding, which would have to be cleared.
        lists_all = in_place == InPlace.WRITE and self._addressed is not None and any(states)
        if lists_all and not (self.is_sharded or self.is_shown or self.gathers_all or is_capturing()):
            return [self.operand(range(len(self.params)), self.total_numel)]
        return self._operands(states)

    def _operands(self, states: bytes) -> list[Tensor]:
        if self.is_shown:
            self.memory.clear_padding()
        if ELSEWHERE in states and self.is_packed:
            return [self.operand(slots, self._span_numel(slots)) for slots in stretches(states, ELSEWHERE)]
        if ELSEWHERE in states and self.reads_in_place:
            return [self.operand(range(len(self.params)), self.total_numel)]
        spans = [self.span(slots) for slots in stretches(states)]
        return [self._operand_of(i) for i in places_of(ELSEWHERE, states)] + spans

    def gathered(self) -> list[Tensor]:
        """All gradients, gathered: stretches of the buffer, padding included."""
        return [self.span(slots) for slots in stretches(self.gather())]

    def zero_(self) -> None:
        """Write zeros into all gradients that are there: into those that a script may hold, where that can be done."""
        states = self.states()
        if ELSEWHERE in states and not (self.is_shown or self.is_sharded or self.is_packed):
            found = [(self.params[i].grad, self.memory.shapes[i]) for i in places_of(ELSEWHERE, states)]
            grads = [
                grad
                for grad, shape in found
                if grad is not None and grad_slots.fits(grad, shape, grad.dtype if self.is_widened else None)
            ]
            if len(grads) == len(found):
                torch._foreach_zero_(grads)
                states = states.replace(bytes([ELSEWHERE]), bytes([NONE]))
        if ELSEWHERE in states:
            states = self.gather()
        if states.count(IN_BUFFER) == len(states):
            self.flat.zero_()
        elif IN_BUFFER in states:
            torch._foreach_zero_([self.memory.views[i] for i in places_of(IN_BUFFER, states)])

    def mask(self) -> Tensor:
        """float32, 1-D: one where a gradient is IN_BUFFER, zero in padding and in NONE slots."""
        states = self.gather()
        mask = torch.zeros_like(self.flat, dtype=torch.float32)
        for view, offset, state in zip(self.views, self.offsets, states, strict=True):
            if state == IN_BUFFER:
                mask[offset : offset + view.numel()] = 1.0
        return mask
