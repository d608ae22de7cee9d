# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Combined buffers: one for each device and dtype of an optimizer's parameters, made when a script requests them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from apex_npu.backends import is_capturing


class _HasParams(Protocol):
    params: list[Tensor]


_T = TypeVar("_T", bound=_HasParams)


def by_kind(params: Iterable[Tensor], leading: Collection[int]) -> list[list[Tensor]]:
    """Return the parameters of each combined buffer: one buffer per device and dtype, those of ``leading`` first.

    Args:
        params: The parameters of all buffers, in order.
        leading: ``id(param)`` of the parameters that have buffers of their own.
    """
    found: dict[tuple[bool, torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        found.setdefault((id(p) not in leading, p.device, p.dtype), []).append(p)
    return [found[kind] for kind in sorted(found, key=itemgetter(0))]


def combined(held: Sequence[_T], leading: Collection[int]) -> list[_T] | None:
    """Return ``held`` in the order of ``by_kind``; None unless each has all parameters of one kind."""
    holder = {id(p): group for group in held for p in group.params}
    kinds = by_kind((p for group in held for p in group.params), leading)
    if len(kinds) != len(held) or any(len({id(holder[id(p)]) for p in kind}) > 1 for kind in kinds):
        return None
    return [holder[id(kind[0])] for kind in kinds]


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
