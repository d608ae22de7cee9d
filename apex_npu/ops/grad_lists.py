# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that stay where autograd left them, as one operand: a tensor without memory, and a table of addresses.

On a GPU, kernels follow the table. On a CPU, the extension's kernels follow the operand without a table.
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
    """The addresses of the gradients of an operand.

    Attributes:
        begins: int64, on the host: the first element of each slot in the operand.
        lengths: int64, on the host: the number of elements of each slot.
        on_device: int64: for each slot, the address of the operand if the gradient were in its place, plus 1 if the
            gradient has the dtype ``narrow``; 0 if there is no gradient.
        wide: The dtype of the operand, and of gradients that are not narrow.
        narrow: The dtype of the other gradients; None if there are no others.
        kept: A dict that keeps plans for these slots for the next call.
    """

    begins: Tensor
    lengths: Tensor
    on_device: Tensor
    wide: torch.dtype
    narrow: torch.dtype | None
    kept: dict[Any, Any]


def _is_none(tensor: object) -> bool:
    return False


# Returns whether an operand is a list of gradients in place. Such an operand has no memory, and only ops can read it.
is_grad_list: Callable[[object], bool] = _is_none if extension is None else extension.is_grad_list


class SentTables:
    """Tables of addresses on a device, kept because gradients mostly have the addresses of a recent step."""

    MOST = 4

    def __init__(self) -> None:
        # The key has the stream: another stream might read before the copy, or after the memory is used again.
        self._sent: dict[tuple[int, bytes], Tensor] = {}

    def on(self, device: torch.device, addresses: Tensor) -> Tensor:
        """Copy ``addresses`` from the host to ``device`` without a wait; return a previous copy if there is one."""
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
    """Consecutive slots whose gradients are listed in each step, mostly at the addresses of the previous step."""

    def __init__(self, begins: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the ranges of the slots; see ``Addresses``."""
        self._begins, self._lengths, self._found = (
            torch.tensor(numbers, dtype=torch.int64, device="cpu") for numbers in (begins, lengths, [0] * len(begins))
        )
        self._sent = SentTables()
        self._kept: dict[Any, Any] = {}

    def add_addresses(self, grads: Tensor) -> None:
        """Find the gradients of the operand ``grads`` for kernels, without a wait.

        If they have more than one other dtype besides the operand's, no addresses are added, and kernels read a copy.
        """
        others = extension.grad_addresses(grads, self._begins, self._lengths, self._found)
        if len(others) <= 1:
            on_device, narrow = self._sent.on(grads.device, self._found), others[0] if others else None
            found = Addresses(self._begins, self._lengths, on_device, grads.dtype, narrow, self._kept)
            vars(grads)["addresses"] = found


def addresses_of(grads: Tensor) -> Addresses | None:
    """Return the addresses that ``ListedSlots.add_addresses`` has added to ``grads``, or None."""
    found: Addresses | None = vars(grads).get("addresses")
    return found


@torch.no_grad()
def dense(grads: Tensor) -> Tensor:
    """Return a copy of the operand with memory, and with zeros for missing gradients."""
    flat = torch.zeros(grads.numel(), dtype=grads.dtype, device=grads.device)
    found: list[tuple[Tensor, int]] = extension.listed_grads(grads)  # each with its first element in the operand
    for dtype in {grad.dtype for grad, _ in found}:
        pairs = [(grad, begin) for grad, begin in found if grad.dtype == dtype]
        slots = [flat[begin : begin + grad.numel()] for grad, begin in pairs]
        torch._foreach_copy_(slots, [grad for grad, _ in pairs])
    return flat


def with_memory(operand: _T) -> _T | Tensor:
    """Return ``dense(operand)`` if ``operand`` is a list of gradients, and else ``operand``."""
    return dense(operand) if isinstance(operand, Tensor) and is_grad_list(operand) else operand
