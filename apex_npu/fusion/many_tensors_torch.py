# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``many_tensors.py`` in pure torch."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from apex_npu.ops import LOW_PRECISION

_GRAD, _DTYPE = attrgetter("grad"), attrgetter("dtype")


def increment_versions(tensors: list[Tensor]) -> None:
    """Have autograd notice that ``tensors`` have been written, through memory that they share."""
    torch.autograd.graph.increment_version(tensors)


def drop_grads(tensors: list[Tensor]) -> None:
    """``tensor.grad = None``, for each."""
    for tensor in tensors:
        tensor.grad = None


@torch.no_grad()
def zero_grads(tensors: list[Tensor]) -> None:
    """``tensor.grad.zero_()``, for each that has a gradient."""
    grads = [grad for grad in map(_GRAD, tensors) if grad is not None]
    if grads:
        torch._foreach_zero_(grads)


def grads_of(tensors: list[Tensor]) -> list[Tensor | None]:
    """``tensor.grad`` of each."""
    return list(map(_GRAD, tensors))


def versions_of(tensors: list[Tensor | None]) -> list[int]:
    """How often each has been written, by autograd's count; of None 0."""
    return [0 if tensor is None else tensor._version for tensor in tensors]


def low_precision_of(tensors: list[Tensor]) -> list[int]:
    """The indices of those in float16 or bfloat16."""
    return [i for i, dtype in enumerate(map(_DTYPE, tensors)) if dtype in LOW_PRECISION]


def are_same(a: Sequence[object], b: Sequence[object]) -> bool:
    """True where both have the very same items, in order."""
    return len(a) == len(b) and all(map(is_, a, b))


def hold_values(dicts: list[dict[str, Any]], keys: list[str], values: list[Any]) -> bool:
    """True where ``dicts[i].get(keys[i])`` is ``values[i]``, the very object, for each i."""
    return all(map(is_, map(dict.get, dicts, keys), values))
