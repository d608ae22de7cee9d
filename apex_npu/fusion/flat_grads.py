# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of some parameters in one flat buffer.

Autograd, or the user, may put any tensor into ``param.grad``: ``gather`` copies it into its slot. Gradients that need
no copy may stay where they are. ``grad_slots.py`` has the states of gradients, and ``grad_memory.py`` the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.backends import is_capturing
from apex_npu.backends._torch_private import no_grad
from apex_npu.fusion import grad_memory, grad_slots
from apex_npu.fusion.flat_buffer import plan
from apex_npu.fusion.grad_memory import AddressedGrads, GradCopier, GradMemory
from apex_npu.fusion.grad_slots import (
    ELSEWHERE,
    IN_BUFFER,
    NONE,
    InPlace,
    can_be_joined,
    check_grad,
    places_of,
    stay_elsewhere,
    stretches,
    with_state,
)
from apex_npu.fusion.storage import SlotTable, increment_versions
from apex_npu.ops import cats_lists, unscale_grads
from apex_npu.ops.gather import gathers_in_one_pass, reads_listed, takes_addresses, takes_grads

_GRAD = attrgetter("grad")


class FlatGrads:
    """The gradient slots of ``params``, laid out like the parameters themselves; memory is allocated at first use.

    Attributes:
        params: The parameters. Each has a slot, with or without a gradient.
        full_params: The parameters whose gradients users see: ``params``, or the sharded parameters whose local parts
            ``params`` are.
        is_sharded: ``full_params`` are sharded parameters.
        offsets: For each parameter, the number of elements before its slot.
        total_numel: The number of elements of the buffer.
        reads_in_place: Kernels read all ELSEWHERE gradients in place, in one call. If not, 16-bit
            gradients of float32 slots can stay, and kernels read a copy of them in one 16-bit tensor.
        is_shown: A script has the buffer. Gradients are then always copied there, and padding may be written.
        gathers_all: Gradients are always copied into slots, because a CUDA graph has the slots' addresses, or because
            no kernel follows addresses.
        is_widened: Slots are float32 and parameters have 16 bits.
        memory: The buffer, and the views of its slots.
    """

    is_sharded = False
    gathers_all = False
    is_widened = False

    def __init__(self, params: Sequence[Tensor], offsets: Sequence[int], total_numel: int) -> None:
        """Plan the slots, without memory; ``params`` share dtype and device."""
        self.params = self.full_params = list(params)
        self.offsets = list(offsets)
        self.reads_in_place = bool(self.params) and reads_listed(self.params[0])
        self.is_shown = False
        self._may_be_captured = bool(self.params) and self.params[0].device.type != "cpu"
        self._in_one_pass = bool(self.params) and gathers_in_one_pass(self.params[0])
        self.total_numel = total_numel
        self.memory = GradMemory(self.params, self.offsets, total_numel)
        self._copier: GradCopier | None = None
        self._addressed = AddressedGrads(self.memory) if self.params and takes_addresses(self.params[0]) else None
        self._table = SlotTable(self.params)

    def widen(self) -> None:
        """Make the slots float32, for gradients of 16-bit parameters. Must be called before memory is allocated."""
        self.is_widened = True
        lends = self.memory.lends
        self.memory = GradMemory(self.params, self.offsets, self.total_numel, torch.float32)
        self.memory.lends = lends
        if self._addressed is not None:
            self._addressed = AddressedGrads(self.memory)

    @classmethod
    def apart(cls, params: Sequence[Tensor]) -> FlatGrads:
        """Return one slot for each of ``params``, in their order, independent of their memory."""
        planned = plan([torch.empty_like(p, device="meta") for p in params])
        return cls(params, planned.offsets, planned.layout.total_numel)

    @property
    def device(self) -> torch.device:
        """The device of all gradients."""
        return self.params[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the buffer."""
        return self.memory.shapes[0].dtype

    def _allocate(self, *, pads: bool = False) -> Tensor:
        if self.memory.is_lent:
            self._take_up()
        return self.memory.allocate(pads=pads)

    def _take_up(self) -> None:
        self.memory.take_up()

    @property
    def has_buffer(self) -> bool:
        """True if the buffer has memory."""
        if self.memory.is_lent:
            self._take_up()
        return bool(self.memory.views)

    @property
    def flat(self) -> Tensor:
        """The buffer: all slots, and their padding, which is zero. Slots that are NONE have arbitrary old values."""
        return self._allocate()

    def show(self) -> Tensor:
        """Return ``flat`` for a script to read and write, with all gradients, and zeros for those that are None.

        Raises:
            RuntimeError: ``gather`` raises it; or this is the first call, and a CUDA graph is being captured.
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
        """The views of the slots, one per parameter and shaped like it, into which new gradients are written.

        A former gradient that is still referenced (PCGrad keeps ``p.grad`` of each task) moves out of its slot first.
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
        """Return one byte per parameter, of all or of ``slots``: NONE, IN_BUFFER or ELSEWHERE."""
        return self._find(slots, InPlace.NO)[0]

    def _find(self, slots: range | None, in_place: InPlace, least_numel: int | None = None) -> tuple[bytes, list[int]]:
        """Return the states of ``slots``, and the slots to gather; see ``GradSlots.states``."""
        if self.memory.is_lent:
            self._take_up()
        if self.is_shown or self.gathers_all or (self._may_be_captured and is_capturing()):
            in_place = InPlace.NO  # a replay would read the addresses of the capture
        if least_numel is None:
            multiplied = in_place == InPlace.WRITE and self._addressed is None and not self.is_sharded
            least_numel = grad_slots.WRITTEN_NUMEL if multiplied else 0
        params, views, first = self.params, self.memory.views or self.params, 0
        if slots is not None:
            first = slots.start
            params, views = params[first : slots.stop], views[first : slots.stop]
        found: tuple[bytes, list[int]] = self.memory.slots.states(
            params, views, first, in_place, least_numel, self.is_sharded
        )
        states, to_gather = found
        joins = in_place == InPlace.READ and not self.reads_in_place and self.dtype == torch.float32
        joins = joins and self.total_numel >= grad_memory.LENT_NUMEL  # else fewer launches gather them
        if joins and IN_BUFFER not in states and can_be_joined([params[i - first].grad for i in to_gather]):
            return states, []
        return found

    def broken(self) -> list[int]:
        """Return the indices of parameters whose address, shape, dtype or device has changed since the plan."""
        return self._table.broken(self.params)

    def span(self, slots: range) -> Tensor:
        """Return the memory of consecutive ``slots``, padding included."""
        end = self.offsets[slots.stop] if slots.stop < len(self.offsets) else self.total_numel
        return self.flat[self.offsets[slots.start] : end]

    def gather(self, slots: range | None = None, *, in_place: InPlace = InPlace.NO) -> bytes:
        """Bring every gradient into its slot: afterwards ``param.grad`` is None or the slot's view.

        Args:
            slots: The slots to gather; None: all.
            in_place: Which gradients may stay ELSEWHERE instead.

        Returns:
            One byte per parameter: NONE, IN_BUFFER, or ELSEWHERE if the gradient has stayed there.

        Raises:
            RuntimeError: A gradient is sparse, not of its parameter's dtype, or a subclass such as DTensor; nothing has
                been copied then.
        """
        at_once = self._addressed and in_place == InPlace.NO and not self.is_sharded and self.has_buffer
        if at_once and (taken := self._take_by_address(slots)) is not None:
            return taken
        states, to_gather = self._find(slots, in_place)
        return self._gather(slots, states, to_gather) if to_gather else states

    def _gather(self, slots: range | None, states: bytes, to_gather: list[int]) -> bytes:
        if self._addressed:
            stay = stay_elsewhere(states, to_gather)
            taken = self._take_by_address(to_gather if stay else slots)
            if taken is not None:
                return with_state(IN_BUFFER, states, to_gather, 0 if slots is None else slots.start)
        if IN_BUFFER not in states and self._in_one_pass:
            all_of_them = slots is None and not stay_elsewhere(states, to_gather)
            self.take(slots=None if all_of_them else to_gather)
        else:
            self._take_batches(to_gather, 1.0, None)
        return with_state(IN_BUFFER, states, to_gather, 0 if slots is None else slots.start)

    def _copy_in(self, indices: list[int], grads: list[Tensor]) -> list[Tensor]:
        """Copy ``grads`` into the slots ``indices``, and return the views of these."""
        pads = cats_lists(self.device) and len(indices) == len(self.params)  # the copy then also writes zeros
        self._allocate(pads=pads)
        views = self.memory.views if pads and not self.memory.is_padded else self.views
        slots_of_them = [views[i] for i in indices]
        self._make_copier().copy_in(indices, slots_of_them, grads)
        self.memory.is_padded = True  # last: after an error above, the next use writes the padding
        return slots_of_them

    def stay_narrow(self) -> bool:
        """Return True if the step reads a 16-bit copy of 16-bit gradients, so that they need no float32 memory."""
        states, to_gather = self._find(None, InPlace.READ)
        return not self.reads_in_place and not to_gather and ELSEWHERE in states

    def gather_times(self, factor: float, slots: range) -> bytes:
        """Gather ``slots``, and multiply these gradients by ``factor``; in one pass if the device can."""
        states, to_gather = self._find(slots, InPlace.NO)
        if to_gather and IN_BUFFER not in states and (self._in_one_pass or self._addressed):
            self.take(factor, slots=slots)
            return with_state(IN_BUFFER, states, to_gather, slots.start)
        states = self.gather(slots)
        if factor != 1.0 and IN_BUFFER in states:
            self.span(slots).mul_(factor)
        return states

    def take(self, inv_scale: float = 1.0, found_inf: Tensor | None = None, slots: Sequence[int] | None = None) -> None:
        """Copy the gradients into the slots, multiplied by ``inv_scale``, in one pass.

        Args:
            inv_scale: 1 / loss scale.
            found_inf: The argument of ``unscale_``.
            slots: The slots to fill; None: all.

        Raises:
            RuntimeError: A gradient is sparse, not of its parameter's dtype, or a subclass such as DTensor; nothing has
                been copied then.
        """
        if self._addressed and self._take_by_address(slots, inv_scale, found_inf) is not None:
            return
        taken = range(len(self.params)) if slots is None else slots
        if not self._in_one_pass:
            self._take_batches(taken, inv_scale, found_inf)
            return
        params, views = self.params, self.views
        if slots is not None:
            params, views = ([tensors[i] for i in slots] for tensors in (params, views))
        unfit = extension.take_grads_cpu(params, views, inv_scale, found_inf)
        if unfit is not None:
            index = taken[unfit]
            grad = self.params[index].grad
            check_grad(index, self.params[index], grad, self.dtype)
            raise RuntimeError(f"parameter {index} has a gradient that cannot be fused: {grad!r}")

    def _take_by_address(
        self, slots: Sequence[int] | None, inv_scale: float = 1.0, found_inf: Tensor | None = None
    ) -> bytes | None:
        """Do ``take`` by a kernel that follows addresses. If ``slots`` is None, also multiply gradients in slots.

        Returns:
            The states of the slots afterwards. None, with nothing done, if the kernel does not compile, or while a CUDA
            graph is captured, whose replay would read the addresses of the capture.
        """
        if self._addressed is None or is_capturing():
            return None
        flat = self.flat
        if self.is_shown:
            self.memory.clear_padding()
        taken = self._addressed.take(flat, slots, inv_scale, found_inf)
        if taken is None:
            self._addressed, self.gathers_all = None, True
            return None
        states, apart = taken
        if apart:
            self._unscale_operands(states, inv_scale, found_inf)
        return states

    @no_grad
    def _joined(self, slots: range, numel: int) -> Tensor:
        """Return a copy of the 16-bit gradients of ``slots``, 1-D with ``numel`` elements, and zeros between them."""
        grads = [(i, grad) for i in slots if (grad := self.params[i].grad) is not None]
        indices, found = [i - slots.start for i, _ in grads], [grad for _, grad in grads]
        offsets = [offset - self.offsets[slots.start] for offset in self.offsets[slots.start : slots.stop]]
        shapes = self.memory.shapes[slots.start : slots.stop]
        pads = len(grads) == len(slots) and cats_lists(self.device)  # the copy then also writes the zeros
        flat = (torch.empty if pads else torch.zeros)(numel, dtype=found[0].dtype, device=self.device)
        views = [flat.as_strided(shapes[i].size(), shapes[i].stride(), offsets[i]) for i in indices]
        GradCopier(flat, offsets, shapes, pads=pads).copy_in(indices, views, found)
        return flat

    def sum_into_slots(self, held: Mapping[int, Tensor], inv_scale: float) -> Tensor | None:
        """Add the present 16-bit gradients times ``inv_scale`` to the slots, in few launches for any number of them.

        Args:
            held: Maps the index of each parameter to its former gradient, which must be in its slot.
            inv_scale: 1 / loss scale.

        Returns:
            The buffer, or None with nothing changed: on a CPU, or if the gradients are not alike.
        """
        views = self.memory.views
        if self.device.type == "cpu" or self.is_sharded or len(held) < len(self.params):
            return None
        if not views or any(views[i] is not grad for i, grad in held.items()):
            return None
        if not can_be_joined([grad for p in self.params if (grad := p.grad) is not None]):
            return None
        flat = self.flat
        flat.add_(self._joined(range(len(self.params)), self.total_numel), alpha=inv_scale)
        return flat

    def unscale_(self, inv_scale: float, found_inf: Tensor | None) -> None:
        """Multiply all gradients, in place or while they are copied into their slots.

        Afterwards no gradient shares its memory with another, so that the next backward may add to them.

        Args:
            inv_scale: The factor: 1 / loss scale.
            found_inf: float32, one element; set to 1 if a gradient is not finite. None: do not check.

        Raises:
            RuntimeError: ``gather`` raises it.
        """
        slots, views = self.memory.slots, self.memory.views
        at_once = self._in_one_pass and inv_scale != 1.0 and views and not self.is_shown
        if not at_once or not slots.unscale(self.params, views, inv_scale, found_inf, grad_slots.WRITTEN_NUMEL):
            self._unscale_any(inv_scale, found_inf)

    @no_grad
    def _unscale_any(self, inv_scale: float, found_inf: Tensor | None) -> None:
        """Do ``unscale_`` in several steps, for any device and any gradients."""
        if inv_scale == 1.0 and found_inf is None:
            states, to_gather = self._find(None, InPlace.WRITE, 0)
            if to_gather:
                self._gather(None, states, to_gather)
            return
        states, to_gather = self._find(None, InPlace.WRITE)
        stay = stay_elsewhere(states, to_gather)
        in_one_call = stay and self.reads_in_place
        if to_gather and IN_BUFFER not in states and not in_one_call and takes_grads(self.params[0]):
            self.take(inv_scale, found_inf, to_gather if stay else None)
            states = with_state(NONE, states, to_gather)  # these are done
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
    def _take_batches(self, indices: Sequence[int], inv_scale: float, found_inf: Tensor | None) -> None:
        """Do ``take`` on devices without a kernel that does it in one pass."""
        given = list(map(_GRAD, self.params))
        there = [i for i in indices if given[i] is not None]
        if not there:
            return
        grads = self.memory.readable(there, [given[i] for i in there])
        slots_of_them = self._copy_in(there, grads)
        unscale_grads(list(map(self.span, self._make_copier().batches(there))), inv_scale, found_inf)
        extension.set_grads([self.params[i] for i in there], slots_of_them)

    def operand(self, slots: range, numel: int, *, writable: bool = True) -> Tensor:
        """Return the gradients of consecutive ``slots`` for ``ops`` to read. No gradient may need gathering.

        The operand is 1-D and has ``numel`` elements from the first slot on. If it has no memory, only ops can read it,
        and ``multiply_`` can write it if it is ``writable``.
        """
        if not self.reads_in_place:
            return self._joined(slots, numel)
        listed: Tensor = self.memory.slots.grad_list(
            self.params[slots.start : slots.stop], slots.start, numel, writable
        )
        if self._addressed is not None:
            self._addressed.add_addresses(listed, slots)
        return listed

    def operands(self, in_place: InPlace) -> list[Tensor]:
        """Return all gradients in few 1-D pieces: one ``operand`` if some are ELSEWHERE, else stretches of the buffer.

        Args:
            in_place: READ if ``ops`` read the pieces, WRITE if ``multiply_`` writes them; NO for any operator.
        """
        states = self.gather(in_place=in_place)
        # Gradients in slots are also listed, so that nothing writes to padding, which would have to be cleared.
        lists_all = in_place == InPlace.WRITE and self._addressed is not None and any(states)
        if lists_all and not (self.is_sharded or self.is_shown or self.gathers_all or is_capturing()):
            return [self.operand(range(len(self.params)), self.total_numel)]
        return self._operands(states)

    def _operands(self, states: bytes) -> list[Tensor]:
        if self.is_shown:
            self.memory.clear_padding()
        if ELSEWHERE in states:
            return [self.operand(range(len(self.params)), self.total_numel)]
        return [self.span(slots) for slots in stretches(states)]

    def mask(self) -> Tensor:
        """Gather, and return a 1-D float32 mask: one where a gradient is IN_BUFFER, zero in padding and NONE slots."""
        states = self.gather()
        mask = torch.zeros_like(self.flat, dtype=torch.float32)
        for view, offset, state in zip(self.views, self.offsets, states, strict=True):
            if state == IN_BUFFER:
                mask[offset : offset + view.numel()] = 1.0
        return mask


def check_combinable() -> None:
    """Require that the layout of memory may change now.

    Raises:
        RuntimeError: A CUDA graph is being captured.
    """
    if is_capturing():
        raise RuntimeError(
            "combined buffers cannot be made while a CUDA graph is being captured: tensors would move into them "
            "immediately, but their values only when the graph is replayed. Call the accessor once before the capture. "
            "Nothing has moved"
        )
