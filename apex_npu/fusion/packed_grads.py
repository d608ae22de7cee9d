# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""16-bit gradients in one tensor, for steps that read them there.

The gradients are views of this tensor, so that float32 gradients, twice as large, are not needed. Only the gradients
reference it, so that its memory is freed when they are cleared in any way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex_npu.fusion.grad_copier import GradCopier
from apex_npu.fusion.grad_slots import dispatches_in_python
from apex_npu.fusion.many_tensors import grads_of, set_grads
from apex_npu.ops import LOW_PRECISION, cats_lists

# Gradients of at least this many elements are packed. A smaller float32 buffer takes at most 32 MiB, and is kept.
PACKED_NUMEL = 1 << 23


def pack_grads(
    params: Sequence[Tensor],
    slots: Any,
    shapes: Sequence[Tensor],
    offsets: Sequence[int],
    total_numel: int,
) -> bool:
    """Copy the gradients of ``params`` into a new tensor, and make the gradients views of it.

    Args:
        params: The parameters.
        slots: The ``GradSlots`` of their gradients.
        shapes: Tensors with the sizes and strides of the slots.
        offsets: For each slot, the number of elements before it.
        total_numel: The number of elements of the tensor, padding included.

    Returns:
        False, with nothing changed, unless all gradients are dense tensors of one 16-bit dtype.
    """
    found = grads_of(list(params))
    indices = [i for i, grad in enumerate(found) if grad is not None]
    grads = [grad for grad in found if grad is not None]
    if not _can_be_packed(grads):
        return False
    # One launch also writes the zeros between neighbours.
    pads = len(indices) == len(shapes) and cats_lists(grads[0].device)
    flat = (torch.empty if pads else torch.zeros)(total_numel, dtype=grads[0].dtype, device=grads[0].device)
    views = slots.views_in(flat)
    if len(indices) < len(views):
        views, params = ([tensors[i] for i in indices] for tensors in (views, params))
    GradCopier(flat, offsets, shapes, pads=pads).copy_in(indices, views, grads)
    set_grads(list(params), views)
    return True


def _can_be_packed(grads: Sequence[Tensor]) -> bool:
    return (
        bool(grads)
        and len({grad.dtype for grad in grads}) == 1
        and grads[0].dtype in LOW_PRECISION
        and all(grad.layout == torch.strided and not grad.requires_grad for grad in grads)
        and not any(map(dispatches_in_python, grads))
    )


def packed_in(grad: Tensor) -> Tensor:
    """Return the tensor that ``grad`` is a view of: 1-D, padding included."""
    numel = grad.untyped_storage().nbytes() // grad.element_size()
    return grad.detach().as_strided((numel,), (1,), 0)
