# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``storage.py`` in pure torch.

Pure torch cannot re-point a storage: only the tensors that are passed follow, not their other aliases.
``move_storages`` warns when there are any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from apex_npu.backends._torch_private import (
    autocast_disabler,
    has_kernel,
    has_python_dispatch,
    keys_below,
    tensor_guards,
)
from apex_npu.backends.script_warnings import warn
from apex_npu.fusion.layout import extent_numel
from apex_npu.fusion.storage_common import SlotTable, has_unnamed_aliases, storage_numel

# Written on storages that are part of a fused buffer: ``untyped_storage()`` gives one object for all aliases, which
# lives as long as their memory. It is True, or the buffer, where that has another storage.
_SLOT_MARK = "_apex_npu_slot"


def check_change_data_ptr(dst: Tensor, src: Tensor, offset: int) -> None:
    """Raise what ``change_data_ptr(dst, src, offset)`` would raise; move nothing."""
    for name, t in (("dst", dst), ("src", src)):
        if t.layout != torch.strided:
            raise TypeError(f"change_data_ptr: {name} must be dense (strided), got layout {t.layout}")
        if has_python_dispatch(t):
            raise TypeError(
                f"change_data_ptr: {name} must be a plain tensor with memory of its own, got {type(t).__name__}; "
                "pass its local tensor"
            )
        if t.is_conj() or t.is_neg():
            raise TypeError(
                f"change_data_ptr: {name} must not be a lazy conjugate or negative; call resolve_conj() first"
            )
    if dst.dtype != src.dtype:
        raise TypeError(f"change_data_ptr: dst and src must have one dtype, got {dst.dtype} and {src.dtype}")
    if dst.device != src.device:
        raise ValueError(f"change_data_ptr: dst and src must be on one device, got {dst.device} and {src.device}")
    reach = dst.storage_offset() + extent_numel(dst.size(), dst.stride())
    if reach > storage_numel(dst):
        raise ValueError(
            f"change_data_ptr: dst reaches over the end of its storage: {reach} > {storage_numel(dst)} elements"
        )
    _check_range(offset, storage_numel(dst), src)
    if dst.untyped_storage()._cdata == src.untyped_storage()._cdata:
        raise ValueError(
            "change_data_ptr: dst and src are views of one storage, which cannot be pointed into itself; "
            "pass src.clone() or a new buffer"
        )


def _check_range(offset: int, need_numel: int, src: Tensor) -> None:
    room_numel = extent_numel(src.size(), src.stride())
    if offset < 0:
        raise ValueError(f"change_data_ptr: offset must be >= 0 elements, got {offset}")
    if offset + need_numel > room_numel:
        raise ValueError(
            f"change_data_ptr: elements [{offset}, {offset + need_numel}) are outside src, which has {room_numel} "
            "(offset and extent count elements)"
        )


def change_data_ptr(dst: Tensor, src: Tensor, offset: int) -> None:
    """Make the storage of ``dst`` begin ``offset`` elements after the first element of ``src``.

    ``dst`` and every alias of it see ``src``'s memory from then on; values are not copied, sizes and strides stay, and
    so does the identity of a Parameter. The memory is owned jointly and outlives ``src``. What looks at
    ``dst``'s memory from outside torch (a numpy array) goes on seeing the old one, which stays allocated.

    Args:
        dst: Any dense tensor; its whole storage moves.
        src: The buffer, of the same dtype and device.
        offset: Elements, counted from where ``src`` itself begins.

    Raises:
        TypeError: Other dtype; sparse, quantised, lazily conjugated tensors or tensor subclasses.
        ValueError: Other device; a range outside ``src``; two views of one storage; memory that ``src`` does not own.
    """
    check_change_data_ptr(dst, src, offset)
    if src.is_meta:
        return  # nothing to point at
    _point_at_view([dst], storage_view(src, offset, (storage_numel(dst),), (1,)))


def move_storages(
    lists: Sequence[Sequence[Tensor]], buffer: Tensor, offsets: Sequence[int], *, copy_values: bool
) -> None:
    """Like ``change_data_ptr``, for the one storage that each of ``lists`` shares; a part of a storage moves by itself.

    Args:
        lists: Tensors that follow; without the extension no others do.
        buffer: Where they go.
        offsets: One for each list.
        copy_values: Copy the elements of the storages, too.

    Raises:
        TypeError, ValueError: As of ``change_data_ptr``; nothing has moved then.
    """
    for tensors, offset in zip(lists, offsets, strict=True):
        if not is_part_of_storage(tensors[0]):  # it has been checked when it got there
            check_change_data_ptr(tensors[0], buffer, offset)
    for tensors, offset in zip(lists, offsets, strict=True):
        if copy_values:
            numel = storage_numel(tensors[0])  # no name for the view: it would count as one that does not follow
            buffer.narrow(0, offset, numel).copy_(tensors[0].detach().as_strided((numel,), (1,), 0))
    for tensors, offset in zip(lists, offsets, strict=True):
        _move_storage(tensors, buffer, offset)


def _move_storage(tensors: Sequence[Tensor], buffer: Tensor, offset: int) -> None:
    if is_part_of_storage(tensors[0]):
        for t in tensors:
            t.data = storage_view(buffer, offset, t.size(), t.stride())
        return
    if has_unnamed_aliases(tensors):
        warn(
            f"a fused tensor of shape {tuple(tensors[0].shape)} has other views, which will not follow it into the "
            "fused buffer: without the C++ extension only the tensors that are passed can; build the extension, or "
            "take such views after fusing"
        )
    _point_at_view(tensors, storage_view(buffer, offset, (storage_numel(tensors[0]),), (1,)))


@torch.no_grad()
def move_out(tensor: Tensor) -> None:
    """Move the storage of ``tensor`` out of the buffer that it is a slot of, values included."""
    tensor.data = tensor.detach().clone()


def _point_at_view(tensors: Sequence[Tensor], view: Tensor) -> None:
    begin = view.storage_offset()  # not 0 where the view could not get a storage of its own
    for t in tensors:
        t.data = view.as_strided(t.size(), t.stride(), begin + t.storage_offset())


def storage_view(src: Tensor, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A tensor over ``src``'s memory, ``offset`` elements after its first, with a storage of its own size.

    Unlike ``src.as_strided(...)`` it is saved, deep-copied and shared alone, not with the whole buffer.
    """
    need_numel = extent_numel(size, stride)
    _check_range(offset, need_numel, src)
    part = src.detach().as_strided((need_numel,), (1,), src.storage_offset() + offset)
    mark: bool | Tensor = True
    if _can_have_own_storage(src):
        # A storage of its own size over the same memory. On an NPU there is no way to one: a slice of a storage would
        # lack the description of its format.
        part = torch.utils.dlpack.from_dlpack(part)
        mark = src.detach()
        _pass_record_stream_on()
    setattr(part.untyped_storage(), _SLOT_MARK, mark)
    return part.as_strided(size, stride, part.storage_offset())


def storage_views(src: Tensor, offsets: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """``storage_view`` for each of ``offsets``, with the size and stride of one of ``like``."""
    return [storage_view(src, offset, t.size(), t.stride()) for offset, t in zip(offsets, like, strict=True)]


def _can_have_own_storage(tensor: Tensor) -> bool:
    """True where views can have a storage of their own size, by DLPack."""
    return tensor.device.type in ("cpu", "cuda")


@functools.cache
def _pass_record_stream_on() -> torch.library.Library | None:
    """Have ``record_stream`` of a slot be one of its buffer, too: allocators identify memory by their own pointer."""
    if has_kernel("aten::record_stream", "BackendSelect"):
        return None  # the extension's

    def record_stream(keys: Any, tensor: Tensor, stream: torch.Stream) -> None:
        torch.ops.aten.record_stream.default.redispatch(keys_below(keys, "BackendSelect"), tensor, stream)
        buffer = getattr(tensor.untyped_storage(), _SLOT_MARK, None)
        if isinstance(buffer, Tensor):
            buffer.record_stream(stream)

    library = torch.library.Library("aten", "IMPL")
    library.impl("record_stream", record_stream, "BackendSelect", with_keyset=True)
    return library


def is_slot(tensor: Tensor) -> bool:
    """True where the memory of ``tensor`` is known to be part of a fused buffer."""
    return hasattr(tensor.untyped_storage(), _SLOT_MARK)


def is_part_of_storage(tensor: Tensor) -> bool:
    """True for a slot that has no storage of its own, but a range of its buffer's: on an NPU in pure torch."""
    return is_slot(tensor) and not _can_have_own_storage(tensor)


def slot_table(tensors: Sequence[Tensor]) -> SlotTable:
    """Remember where ``tensors`` are now."""
    return _PythonSlotTable(tensors)


# What a tensor's place consists of. Each is read from all tensors at once, by map(), for speed.
_PLACE: tuple[Callable[[Tensor], object], ...] = (
    Tensor.data_ptr,
    Tensor.size,
    Tensor.stride,
    attrgetter("dtype"),
    attrgetter("device"),
)


class _PythonSlotTable:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._columns = [list(map(ask, tensors)) for ask in _PLACE]
        self._forms = _form_guards(tensors)

    def broken(self, tensors: Sequence[Tensor]) -> list[int]:
        if self._all_in_place(tensors):
            return []
        now = zip(*(map(ask, tensors) for ask in _PLACE), strict=True)
        return [i for i, (a, b) in enumerate(zip(now, zip(*self._columns, strict=True), strict=True)) if a != b]

    def _all_in_place(self, tensors: Sequence[Tensor]) -> bool:
        # The guards may say no of tensors that are as they were, in inference mode for one; never yes of others.
        alike = self._forms is not None and self._forms(tensors)
        asked = zip(_PLACE[:1] if alike else _PLACE, self._columns, strict=False)
        return all(list(map(ask, tensors)) == column for ask, column in asked)


def _form_guards(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool] | None:
    """What says in one call whether tensors have the sizes, strides, dtypes and devices that ``tensors`` have now.

    torch.compile calls it before it runs compiled code; it is no public function. None: this torch has none.
    """
    if not tensors:
        return None
    form_guards, disable_autocast = tensor_guards(), autocast_disabler()
    try:
        with disable_autocast():  # which would count as a difference
            guards = form_guards(
                *tensors,
                dynamic_dims_sizes=[list(t.size()) for t in tensors],
                dynamic_dims_strides=[list(t.stride()) for t in tensors],
            )
    except (TypeError, ValueError, RuntimeError):
        return None
    count = len(tensors)

    def alike(others: Sequence[Tensor]) -> bool:
        with disable_autocast():
            return len(others) == count and bool(guards.check(*others))

    return alike


def allocated_by_torch(tensor: Tensor) -> bool:
    """True where the memory of ``tensor`` came from torch's allocator, not from another process, an array or a file."""
    return not (tensor.device.type == "cpu" and tensor.is_shared())


def follows_aliases() -> bool:
    """True where moving a storage takes all its aliases along, not only the tensors that are named."""
    return False


def aliases_follow(tensors: Sequence[Tensor]) -> bool:
    """True where all that references the one storage of ``tensors`` goes along when it moves."""
    return not has_unnamed_aliases(tensors)


def release_previous(tensor: Tensor) -> bool:
    """Release memory that was kept because something outside torch might still reference it.

    Returns:
        True where nothing is kept any more.
    """
    return True


def watch_copies(flat: Tensor, offsets: Sequence[int], numels: Sequence[int]) -> bool:
    """Have kernels watch ``flat``, a buffer of float16 or bfloat16 copies of parameters, for what scripts write there.

    A kernel that updates parameters, and rounds them into ``flat``, then first gives them what has been written to
    ``flat`` since it did so last.

    Args:
        flat: On any device.
        offsets: Where copies begin; the rest of ``flat`` holds anything.
        numels: Their elements.

    Returns:
        True where the kernels of its device can; else nothing is watched.
    """
    return False


def round_to_copies(params: Tensor, flat: Tensor) -> bool:
    """Do what a kernel does with all of a watched buffer, without an update; False where ``flat`` is not watched."""
    return False


def written_copies(flat: Tensor) -> tuple[int, int]:
    """How many elements of a watched buffer, and of its parameters, have been found written since the last call."""
    return 0, 0
