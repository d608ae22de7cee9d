# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of model parameters in one tensor of their own dtype, for steps of their float32 masters.

Both have views of it as gradients: float32 gradients of the masters, twice as large, need not exist. Nothing else holds
the tensor, so that its memory is free when gradients are cleared, by whatever means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.fusion.grad_copier import GradCopier
from apex_npu.fusion.grad_slots import GradSlots, dispatches_in_python
from apex_npu.fusion.many_tensors import grads_of
from apex_npu.ops import LOW_PRECISION

# Gradients of so many elements are packed: a float32 buffer of fewer takes 32 MiB at most, and stays from step to step.
PACKED_NUMEL = 1 << 23


def pack_grads(
    sources: Sequence[Tensor],
    params: Sequence[Tensor],
    slots: GradSlots,
    shapes: Sequence[Tensor],
    offsets: Sequence[int],
    total_numel: int,
) -> bool:
    """Copy the gradients of ``sources`` into a new tensor, of which these and ``params`` get views as gradients.

    A source whose gradient is a part of other memory, such as a bucket of DistributedDataParallel, keeps that.

    Args:
        sources: Model parameters.
        params: Their masters.
        slots: The gradient slots of the masters.
        shapes: Tensors with the sizes and strides of the slots.
        offsets: The elements before the first of each slot.
        total_numel: Elements of the tensor, padding included.

    Returns:
        False, with nothing changed, where gradients are not dense tensors of one dtype of 16 bits.
    """
    found = grads_of(list(sources))
    indices = [i for i, grad in enumerate(found) if grad is not None]
    grads = [grad for grad in found if grad is not None]
    if not _can_be_packed(grads):
        return False
    known: Any = slots
    flat = torch.zeros(total_numel, dtype=grads[0].dtype, device=grads[0].device)
    views = known.views_in(flat)
    if len(indices) < len(views):
        views, sources, params = ([tensors[i] for i in indices] for tensors in (views, sources, params))
    GradCopier(flat, offsets, shapes).copy_in(indices, views, grads)
    is_alone = [grad.untyped_storage().nbytes() == grad.nbytes for grad in grads]
    extension.set_aliases(list(params), views)
    extension.set_aliases(
        [source for source, alone in zip(sources, is_alone, strict=True) if alone],
        [view for view, alone in zip(views, is_alone, strict=True) if alone],
    )
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
    """The tensor that ``grad`` is a view of: 1-D, padding included."""
    numel = grad.untyped_storage().nbytes() // grad.element_size()
    return grad.detach().as_strided((numel,), (1,), 0)
