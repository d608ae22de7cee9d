# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``torch.npu.FloatTensor`` & co., which torch has for its own devices only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _TypeName(type):
    """The class of ``torch.npu.FloatTensor`` & co., which have no instances of their own, only tensors that match."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and instance.device.type == "npu" and instance.dtype == cls.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) == 1 and isinstance(args[0], (list, tuple)) and not isinstance(args[0], torch.Size):
            return torch.tensor(args[0], dtype=cls.dtype, device="npu", **kwargs)
        if len(args) == 1 and isinstance(args[0], Tensor):
            return args[0].to(device="npu", dtype=cls.dtype)
        return torch.empty(*args or (0,), dtype=cls.dtype, device="npu", **kwargs)


_TYPE_NAMES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


def type_names() -> dict[str, type]:
    """The classes, by name."""
    return {
        name: _TypeName(name, (), {"dtype": dtype, "__module__": "torch.npu"}) for name, dtype in _TYPE_NAMES.items()
    }
