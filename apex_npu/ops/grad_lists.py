# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of a GPU where autograd left them, as one operand: a tensor without memory, and where kernels find them.

On a CPU the extension's kernels follow such an operand by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.backends import number_on

_T = TypeVar("_T")


class Addresses(NamedTuple):
    """Where the gradients of an operand are.

    Attributes:
        begins: int64, on the host: the first element of each slot in the operand.
        lengths: int64, likewise: its elements.
        on_device: int64: for each slot the address that the operand would begin at if the gradient were in its place,
            plus 1 where it is ``narrow``; 0: there is none.
        wide: The dtype of the operand, and of its gradients,
        narrow: But of those that have this; None: none has.
        kept: What was planned for these slots, for the next time.
    """

    begins: Tensor
    lengths: Tensor
    on_device: Tensor
    wide: torch.dtype
    narrow: torch.dtype | None
    kept: dict[Any, Any]


def _is_none(tensor: object) -> bool:
    return False


# True for an operand that refers to gradients where autograd left them: only ops can read it, it has no memory.
is_grad_list: Callable[[object], bool] = _is_none if extension is None else extension.is_grad_list


class SentTables:
    """Tables of addresses that a device has: gradients are, most often, where those of one of the last steps were."""

    MOST = 4

    def __init__(self) -> None:
        # By the stream, too: work on another one could come before the copy, or after the memory is another's.
        self._sent: dict[tuple[int, bytes], Tensor] = {}

    def on(self, device: torch.device, addresses: Tensor) -> Tensor:
        """``addresses``, of the host, on ``device``: without a wait, and without a copy where it has had them."""
        numbers: Any = addresses.numpy()
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = stream, numbers.tobytes()
        found = self._sent.get(key)
        if found is None:
            if len(self._sent) == self.MOST:
                del self._sent[next(iter(self._sent))]
            found = self._sent[key] = number_on(addresses.clone(), device)
        return found


class ListedSlots:
    """Consecutive slots whose gradients are listed in each step, most often at the addresses of the step before."""

    def __init__(self, begins: Sequence[int], lengths: Sequence[int]) -> None:
        """See ``Addresses``."""
        self._begins, self._lengths, self._found = (
            torch.tensor(numbers, dtype=torch.int64, device="cpu") for numbers in (begins, lengths, [0] * len(begins))
        )
        self._sent = SentTables()
        self._kept: dict[Any, Any] = {}

    def add_addresses(self, grads: Tensor) -> None:
        """Find the gradients of the operand ``grads`` for kernels, without a wait.

        Where they have two dtypes beside the operand's, they are copied before they are read.
        """
        others = extension.grad_addresses(grads, self._begins, self._lengths, self._found)
        if len(others) <= 1:
            on_device, narrow = self._sent.on(grads.device, self._found), others[0] if others else None
            found = Addresses(self._begins, self._lengths, on_device, grads.dtype, narrow, self._kept)
            vars(grads)["addresses"] = found


def addresses_of(grads: Tensor) -> Addresses | None:
    """What ``ListedSlots.add_addresses`` has found, if anything; of any other tensor nothing."""
    found: Addresses | None = vars(grads).get("addresses")
    return found


def listed_grads(grads: Tensor) -> list[tuple[Tensor, int]]:
    """The gradients of the operand, 1-D, each with its first element there; writing them is not counted."""
    found: list[tuple[Tensor, int]] = extension.listed_grads(grads)
    return found


def count_writes(grads: Tensor) -> None:
    """Have autograd notice that the gradients of the operand have been written."""
    extension.count_grad_writes(grads)


@torch.no_grad()
def dense(grads: Tensor) -> Tensor:
    """The operand, with memory: a copy, with zeros where there is no gradient."""
    flat = torch.zeros(grads.numel(), dtype=grads.dtype, device=grads.device)
    found = listed_grads(grads)
    for dtype in {grad.dtype for grad, _ in found}:
        pairs = [(grad, begin) for grad, begin in found if grad.dtype == dtype]
        slots = [flat[begin : begin + grad.numel()] for grad, begin in pairs]
        torch._foreach_copy_(slots, [grad for grad, _ in pairs])
    return flat


def with_memory(operand: _T) -> _T | Tensor:
    """``operand``, but ``dense`` where it is a list."""
    return dense(operand) if isinstance(operand, Tensor) and is_grad_list(operand) else operand
