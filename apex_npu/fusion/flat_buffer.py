# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A flat buffer: memory for many tensors, planned with integers, allocated once, then accessed through views."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from apex_npu.backends import for_device
from apex_npu.fusion.storage import aliases_follow, has_unnamed_aliases, move_storages, storage_view, storage_views
from apex_npu.ops import cats_lists
from apex_npu.ops.gather import cat_into

logger = logging.getLogger("apex_npu")


# In bytes: smaller buffers are not reported in the log.
_ANNOUNCED = 2**20

ALIGN_NUMEL = 16
PAD_NUMEL = 32


class Slot(NamedTuple):
    """The place of one storage in a flat buffer.

    Attributes:
        offset_numel: The number of elements before the slot.
        numel: The number of elements of the storage.
    """

    offset_numel: int
    numel: int


@dataclass(frozen=True)
class Layout:
    """Slots in order, and the slot of each tensor.

    Attributes:
        slots: The slots, one per distinct storage, in order of first appearance.
        slot_of: For each tensor the index of its slot; tensors that share a storage share a slot.
        total_numel: The number of elements of the whole buffer.
    """

    slots: tuple[Slot, ...]
    slot_of: tuple[int, ...]
    total_numel: int


def padded_numel(numel: int) -> int:
    """Return the elements that a storage of ``numel`` takes up: rounded up to ``ALIGN_NUMEL``, plus ``PAD_NUMEL``.

    Ascend's vector kernels may read a whole block past the last element.
    """
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL + PAD_NUMEL


def plan_slots(storage_numels: Sequence[int], storage_ids: Sequence[Hashable]) -> Layout:
    """Assign consecutive slots to all distinct storages.

    Args:
        storage_numels: For each tensor, the number of elements of its storage.
        storage_ids: For each tensor, the identity of its storage.

    Raises:
        ValueError: One storage is given two sizes.
    """
    slots: list[Slot] = []
    index_of: dict[Hashable, int] = {}
    slot_of: list[int] = []
    total_numel = 0
    for numel, storage_id in zip(storage_numels, storage_ids, strict=True):
        index = index_of.setdefault(storage_id, len(slots))
        if index == len(slots):
            slots.append(Slot(total_numel, numel))
            total_numel += padded_numel(numel)
        elif slots[index].numel != numel:
            raise ValueError(f"storage {storage_id!r} was given two sizes: {slots[index].numel} and {numel} elements")
        slot_of.append(index)
    return Layout(tuple(slots), tuple(slot_of), total_numel)


def extent_numel(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first to its last, both included; 0 for an empty tensor."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def overlapping(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indices of ranges [begin, end) to leave out so that no two of the others overlap."""
    order = sorted(range(len(spans)), key=lambda i: spans[i][0])  # stable: the first of two equal begins is kept
    found = []
    taken_to: int | None = None
    for i in order:
        begin, end = spans[i]
        if begin == end:
            continue
        if taken_to is not None and begin < taken_to:
            found.append(i)
        else:
            taken_to = end
    return sorted(found)


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if the elements fill their extent without gap or overlap, in any order (such as channels_last)."""
    if 0 in size:
        return True
    expected = 1
    for n, s in zip(reversed(size), reversed(stride), strict=True):  # contiguous, as nearly all are
        if s != expected and n != 1:
            break
        expected *= n
    else:
        return True
    expected = 1
    for n, s in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n != 1), key=lambda dim: dim[1]):
        if s != expected:
            return False
        expected *= n
    return True


def gaps_between(offsets: Sequence[int], numels: Sequence[int]) -> list[int]:
    """Return the number of elements between each range (its first element, its length) and the next; 0 for the last."""
    ends = [offset + numel for offset, numel in zip(offsets, numels, strict=True)]
    return [begin - end for begin, end in zip([*offsets[1:], ends[-1]], ends, strict=True)]


def numbers_in(flat: Tensor) -> list[Tensor]:
    """Return a 0-dim view of each element of ``flat``."""
    return storage_views(flat, range(flat.numel()), [torch.empty((), device="meta")] * flat.numel())


def address_range(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first element of a dense ``tensor``, and that behind its last one."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    return begin, begin + extent_numel(tensor.size(), tensor.stride()) * tensor.element_size()


def mib(nbytes: int) -> str:
    """Return ``nbytes`` as text, in MiB."""
    return f"{nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Plan:
    """The range of each tensor of a list in one flat buffer. ``plan`` makes it, and moves nothing.

    Attributes:
        layout: The slots, one per distinct storage.
        offsets: For each tensor, the number of elements before its first one.
        dtype: The dtype of all tensors.
        device: The device of all tensors.
    """

    layout: Layout
    offsets: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def plan(tensors: Sequence[Tensor]) -> Plan:
    """Plan the layout of ``tensors``, which must share dtype and device, in one buffer. Allocate and move nothing.

    Tensors that share a storage share a slot.

    Raises:
        ValueError: The list is empty, or its tensors differ in device.
        TypeError: The tensors differ in dtype.
    """
    if not tensors:
        raise ValueError("tensors must not be empty")
    dtype, device = tensors[0].dtype, tensors[0].device
    for i, t in enumerate(tensors):
        if t.dtype != dtype:
            raise TypeError(f"all fused tensors must have one dtype: tensors[0] is {dtype}, tensors[{i}] is {t.dtype}")
        if t.device != device:
            raise ValueError(
                f"all fused tensors must be on one device: tensors[0] on {device}, tensors[{i}] on {t.device}"
            )
    backend = for_device(device)
    # For each tensor: how many elements move with it, the identity of its storage, and where it begins there.
    moving = [(backend.storage_numel(t), t.untyped_storage()._cdata, int(t.storage_offset())) for t in tensors]
    layout = plan_slots([numel for numel, _, _ in moving], [key for _, key, _ in moving])
    offsets = tuple(
        layout.slots[slot].offset_numel + begin for slot, (_, _, begin) in zip(layout.slot_of, moving, strict=True)
    )
    return Plan(layout, offsets, dtype, device)


def fills_storage(tensors: Sequence[Tensor]) -> bool:
    """Return True if ``tensors``, which share one storage, make up all of it.

    The result is False for a view of another owner's buffer (a DDP bucket, a slice of a vector), whose other elements
    must not be stepped.
    """
    first = tensors[0]
    if first.is_contiguous() and first.numel() * first.element_size() == first.untyped_storage().nbytes():
        return True  # alone
    backend = for_device(first.device)
    if any(backend.has_private_format(t) for t in tensors):
        return True
    ranges = {(t.storage_offset(), extent_numel(t.size(), t.stride())) for t in tensors}
    return backend.storage_numel(first) <= sum(extent for _, extent in ranges)


class NoRoomError(torch.OutOfMemoryError):
    """Raised if there is no memory for a buffer; nothing has moved, and nothing has been written."""


def _allocated(allocate: Callable[..., Tensor], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        return allocate(numel, dtype=dtype, device=device)
    except RuntimeError as error:
        raise NoRoomError(
            f"a fused buffer of {numel} x {dtype} needs {mib(numel * dtype.itemsize)} on {device}, which are not free; "
            f"nothing has been moved. Free memory, or use the unfused optimizer or combine_grad=False. ({error})"
        ) from error


class FlatBuffer:
    """Owns one flat tensor, and returns views that have separate storages.

    Attributes:
        flat: The buffer, a 1-D tensor that is zero at first. Its padding stays finite and is never part of a view.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate ``numel`` zeros.

        Raises:
            torch.OutOfMemoryError: There is not enough memory; the message says how much was needed.
        """
        self.flat = _allocated(torch.zeros, numel, dtype, device)
        if self.flat.nbytes >= _ANNOUNCED:
            logger.info("fused buffer: %s on %s, %s", mib(self.flat.nbytes), device, dtype)

    def renew(self) -> None:
        """Give ``flat``, and all tensors of its storage, new uninitialised memory; views keep the old memory.

        Raises:
            torch.OutOfMemoryError: There is not enough memory; the message says how much was needed.
        """
        memory = _allocated(torch.empty, self.flat.numel(), self.flat.dtype, self.flat.device)
        move_storages([[self.flat]], memory, [0], copy_values=False)

    def view(self, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
        """Return a view of the elements from ``offset`` on, of this ``size`` and ``stride``."""
        return storage_view(self.flat, offset, size, stride)

    def views_like(self, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
        """Return one view per tensor, with its size and stride (so that transposed tensors match by element)."""
        return storage_views(self.flat, offsets, tensors)

    def adopt(
        self,
        tensors: Sequence[Tensor],
        layout: Layout,
        *,
        copy_values: bool = True,
        aliases: Mapping[int, Sequence[Tensor]] = MappingProxyType({}),
    ) -> None:
        """Move the storages of ``tensors``, with their values, into this buffer: all of them, or none.

        ``aliases``: ``id(tensor)`` → other tensors over its storage, which move with it.

        Raises:
            TypeError, ValueError: A tensor cannot be re-pointed (see ``change_data_ptr``); nothing has moved then.
        """
        members: list[list[Tensor]] = [[] for _ in layout.slots]
        for index, t in zip(layout.slot_of, tensors, strict=True):
            members[index].append(t)
        offsets = [slot.offset_numel for slot in layout.slots]
        moving = [with_aliases(sharing, aliases) for sharing in members]
        with torch.no_grad():
            if not copy_values or not cats_lists(self.flat.device):
                move_storages(moving, self.flat, offsets, copy_values=copy_values)
                return
            # A private format cannot be read as a flat row: its values are saved before the move and restored after it.
            backend = for_device(self.flat.device)
            tiled = [(t, t.clone()) for t in tensors if backend.has_private_format(t)]
            plain = [i for i, sharing in enumerate(members) if not backend.has_private_format(sharing[0])]
            self._cat_storages([members[i][0] for i in plain], [layout.slots[i] for i in plain])
            move_storages(moving, self.flat, offsets, copy_values=False)
            for t, value in tiled:
                t.data.copy_(value)  # .data: the value is unchanged, so autograd need not count a write

    def _cat_storages(self, tensors: Sequence[Tensor], slots: Sequence[Slot]) -> None:
        if not tensors:
            return
        storages = [t.detach().as_strided((slot.numel,), (1,), 0) for t, slot in zip(tensors, slots, strict=True)]
        gaps = gaps_between([slot.offset_numel for slot in slots], [slot.numel for slot in slots])
        end = slots[-1].offset_numel + slots[-1].numel
        cat_into(self.flat[slots[0].offset_numel : end], storages, gaps, self.flat.new_zeros(max(gaps)))


def leave_private_formats(params: Sequence[Tensor]) -> None:
    """Convert parameters in a private format of an NPU to the format that torch's sizes and strides describe.

    Gradients have this format, and a step requires the same order of elements in all operands. Other views of such a
    tensor keep the old memory; the log reports them.
    """
    by_storage: dict[int, list[Tensor]] = {}
    for p in params:
        if for_device(p.device).has_private_format(p):
            by_storage.setdefault(p.untyped_storage()._cdata, []).append(p)
    looked_at = sum(map(has_unnamed_aliases, by_storage.values()))
    for sharing in by_storage.values():
        based = for_device(sharing[0].device).in_base_format(sharing[0].detach())
        for p in sharing:
            p.data = based.as_strided(p.size(), p.stride(), p.storage_offset())
    if by_storage:
        logger.info("%d tensor(s) have left their private formats to be fused", len(by_storage))
    if looked_at:
        logger.warning(
            "%d of them have other views, which keep the old memory: take views of parameters after the first step, "
            "or set p.data = torch_npu.npu_format_cast(p.data, 2) before",
            looked_at,
        )


def with_aliases(sharing: list[Tensor], aliases: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    """Return ``sharing``, and the ``aliases`` of its tensors."""
    return [*sharing, *(alias for t in sharing for alias in aliases.get(id(t), ()))] if aliases else sharing


def may_move(sharing: list[Tensor]) -> bool:
    """Return True if the tensors of ``sharing`` fill their one storage, and all of its aliases would follow a move."""
    return fills_storage(sharing) and len({p.dtype for p in sharing}) == 1 and aliases_follow(sharing)
