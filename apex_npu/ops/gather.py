# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients, as autograd has left them, on their way into slots. Not a dispatcher op: lists are slow to pass there.

``gather_torch.py`` documents what the extension replaces where it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.ops.reference import FLOATS

if extension is None:
    from apex_npu.ops.gather_torch import (
        gather_,
        gathers_in_one_pass,
        multiply_,
        take_grads_,
        unscale_grads,
    )
else:
    from apex_npu.ops.gather_cpp import (
        gather_,
        gathers_in_one_pass,
        multiply_,
        take_grads_,
        unscale_grads,
    )

from apex_npu.ops.gather_cuda import AddressTable, takes_addresses
from apex_npu.ops.gather_torch import as_real

__all__ = [
    "AddressTable",
    "as_real",
    "cat_into",
    "cats_lists",
    "divides_in_update",
    "gather_",
    "gathers_in_one_pass",
    "multiply_",
    "reads_listed",
    "take_grads_",
    "takes_addresses",
    "takes_grads",
    "unscale_grads",
]


def cats_lists(device: torch.device) -> bool:
    """True where ``cat_into`` copies a long list into one tensor, instead of one launch for every few of them."""
    return device.type == "npu"


@torch.no_grad()
def cat_into(out: Tensor, tensors: Sequence[Tensor], gaps: Sequence[int], zeros: Tensor) -> None:
    """Write ``tensors``, one after the other with zeros between them, in one launch however many there are.

    Args:
        out: 1-D, as long as all of that; of any floating dtype.
        tensors: 1-D, and none of them in the memory of ``out``.
        gaps: For each how many zeros follow it; for the last there need be none.
        zeros: 1-D, as many as the largest gap at least. They have the dtype of the tensors, unless these differ:
            a list of one dtype is converted as a whole.
    """
    pads = {gap: zeros[:gap] for gap in set(gaps)}
    pieces: list[Tensor] = [zeros] * (2 * len(tensors))
    pieces[0::2] = tensors
    pieces[1::2] = map(pads.__getitem__, gaps)
    torch.cat(pieces, out=out)


def reads_listed(slot: Tensor) -> bool:
    """True where ops read, and can write, gradients of slots like this one where autograd left them, as one operand."""
    return extension is not None and (slot.device.type == "cpu" or takes_addresses(slot))


def takes_grads(slot: Tensor) -> bool:
    """True where gathering, multiplying and checking gradients in one pass is faster, by any kernel."""
    return (slot.device.type == "cpu" and slot.dtype in FLOATS) or takes_addresses(slot)


def divides_in_update(device: torch.device) -> bool:
    """True where an update with a ``grad_scale`` needs no more launches, or passes over memory, than one without."""
    return device.type != "npu"
