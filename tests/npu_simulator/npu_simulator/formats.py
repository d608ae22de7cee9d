# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Private formats. On an NPU they tile the memory of a tensor and pad it to whole tiles; here they pad it.

The values stay where torch's strides say, in front of the padding, so that every operator works.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from npu_simulator import _C  # type: ignore[attr-defined]
from npu_simulator.control import current_settings, padded_numel


class Format(IntEnum):
    """Numbers of the formats, as ACL has them."""

    UNDEFINED = -1
    NCHW = 0
    NHWC = 1
    ND = 2
    NC1HWC0 = 3
    FRACTAL_Z = 4
    NC1HWC0_C04 = 12
    HWCN = 16
    NDHWC = 27
    FRACTAL_NZ = 29
    NCDHW = 30
    NDC1HWC0 = 32
    FRACTAL_Z_3D = 33


_PRIVATE = {
    Format.NC1HWC0,
    Format.FRACTAL_Z,
    Format.NC1HWC0_C04,
    Format.FRACTAL_NZ,
    Format.NDC1HWC0,
    Format.FRACTAL_Z_3D,
}


def get_npu_format(tensor: Tensor) -> int:
    """The number of the format of ``tensor``."""
    _check_npu(tensor, "get_npu_format")
    number = int(_C.storage_format(tensor))
    if number >= 0:
        return number
    return int({4: Format.NCHW, 5: Format.NCDHW}.get(tensor.dim(), Format.ND))


def get_storage_size(tensor: Tensor) -> int:
    """Elements in the memory of ``tensor``, padding included. A view has the memory of what it is a view of."""
    _check_npu(tensor, "get_storage_size")
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def npu_format_cast(tensor: Tensor, acl_format: int | Tensor) -> Tensor:
    """``tensor`` in another format: a copy, or ``tensor`` itself if it has that format already.

    On a chip without private formats (``npu_simulator.configure(padded_format=False)``, the default) all formats are
    the plain one.
    """
    _check_npu(tensor, "npu_format_cast")
    number = _format_of(acl_format)
    if number == get_npu_format(tensor) or (number in _PRIVATE and not current_settings().padded_format):
        return tensor
    result = _PaddedCopy.apply(tensor, number) if tensor.requires_grad else _padded_copy(tensor, number)
    return result


def npu_format_cast_(tensor: Tensor, acl_format: int | Tensor) -> Tensor:
    """``npu_format_cast`` in place: ``tensor`` gets other memory."""
    result = npu_format_cast(tensor.detach(), acl_format)
    if result.data_ptr() != tensor.data_ptr():
        tensor.data = result
    return tensor


def empty_with_format(
    size: tuple[int, ...],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | str | None = "npu",
    pin_memory: bool | None = None,
    acl_format: int = Format.ND,
) -> Tensor:
    """``torch.empty`` with a format."""
    return npu_format_cast(torch.empty(size, dtype=dtype, device=device), acl_format)


class _PaddedCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: Tensor, number: int) -> Tensor:
        return _padded_copy(tensor, number)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _padded_copy(tensor: Tensor, number: int) -> Tensor:
    numel = padded_numel(tuple(tensor.shape)) if number in _PRIVATE else tensor.numel()
    memory = torch.zeros(numel, dtype=tensor.dtype, device=tensor.device)
    _C.set_storage_format(memory, number)
    # One view away from `memory`, but no view for autograd: a tensor that owns padded memory.
    result = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory.untyped_storage(), 0, tensor.shape)
    with torch.no_grad():
        result.copy_(tensor)
    return result


def _format_of(acl_format: int | Tensor) -> int:
    if isinstance(acl_format, Tensor):
        return get_npu_format(acl_format)
    try:
        return int(Format(int(acl_format)))
    except ValueError:
        known = ", ".join(f"{f.value} ({f.name})" for f in Format)
        raise ValueError(f"acl_format must be one of {known}, got {acl_format!r}") from None


def _check_npu(tensor: Tensor, name: str) -> None:
    if tensor.device.type != "npu":
        raise RuntimeError(f"{name}: the tensor must be on npu, got one on {tensor.device}")
