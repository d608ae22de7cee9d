# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The places of many parameters' gradients, which ``GradSlots`` (``csrc/fused_optim/grad_slots.h``) finds in one call.

A gradient is NONE while ``param.grad is None``, IN_BUFFER while it is the view of its slot, and else ELSEWHERE. An
ELSEWHERE gradient can stay there if its elements are in the slot's order, in CPU or GPU memory outside of all slots.
Kernels then read it in place, and it is not copied into its slot.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from apex_npu.ops import LOW_PRECISION

# The C++ extension uses the same values.
NONE, IN_BUFFER, ELSEWHERE = 0, 1, 2
# The least number of elements of a gradient that is multiplied where it is. Smaller ones are multiplied while they are
# copied into their slots, which is as fast, and leaves them in one piece for later operations.
WRITTEN_NUMEL = 1 << 12


class InPlace(IntEnum):
    """The access to ELSEWHERE gradients. It decides which of them can stay there.

    The C++ extension uses the same values.
    """

    NO = 0  # no gradient can stay
    READ = 1  # gradients of the slot's dtype, or 16-bit ones of a float32 slot, can stay
    WRITE = 2  # gradients of the slot's dtype can stay if they do not share their memory


def places_of(state: int, states: bytes) -> list[int]:
    """Return the indices in ``states`` that are ``state``."""
    return [i for i, found in enumerate(states) if found == state] if state in states else []


def stay_elsewhere(states: bytes, to_gather: list[int]) -> bool:
    """Return True if some ELSEWHERE gradients are not in ``to_gather``."""
    return states.count(ELSEWHERE) > len(to_gather)


def with_state(state: int, states: bytes, slots: list[int], first: int = 0) -> bytes:
    """Return ``states``, of the slots from ``first`` on, with ``state`` for the ELSEWHERE ``slots``."""
    if not stay_elsewhere(states, slots):
        return states.replace(bytes([ELSEWHERE]), bytes([state]))
    changed = bytearray(states)
    for i in slots:
        changed[i - first] = state
    return bytes(changed)


def stretches(states: bytes) -> list[range]:
    """Return the maximal ranges of slots that are IN_BUFFER."""
    return [range(*found.span()) for found in re.finditer(re.escape(bytes([IN_BUFFER])) + b"+", states)]


def dispatches_in_python(tensor: Tensor) -> bool:
    """Return True for a subclass whose elements only its own code can access."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def can_be_joined(grads: Sequence[Tensor | None]) -> bool:
    """Return True if ``grads`` are plain tensors of one 16-bit dtype, which one 16-bit tensor can hold."""
    return len({grad.dtype for grad in grads if grad is not None}) == 1 and all(
        grad is not None
        and grad.dtype in LOW_PRECISION
        and grad.layout == torch.strided
        and not grad.requires_grad
        and not dispatches_in_python(grad)
        for grad in grads
    )


def check_grad(index: int, param: Tensor, grad: Tensor | None, dtype: torch.dtype) -> None:
    """Require that the gradient of ``param``, number ``index``, can be fused.

    Args:
        index: The number of the parameter in error messages.
        param: The parameter.
        grad: The gradient.
        dtype: The dtype of its slot.

    Raises:
        RuntimeError: The gradient is sparse, of a dtype that the slot cannot hold, on another device than the
            parameter, or a subclass such as DTensor.
    """
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"parameter {index} of shape {tuple(param.shape)} has a sparse gradient ({grad.layout}), which cannot "
            "be fused; use a layer with sparse=False, or torch.optim.SparseAdam or SGD for it, without combine_grad"
        )
    if grad.device != param.device:
        raise RuntimeError(
            f"parameter {index} of shape {tuple(param.shape)} is on {param.device} and has a gradient on "
            f"{grad.device}: a part of the model has been moved since training began. Move parts before "
            "amp.initialize, or the whole model by model.to(device)"
        )
    narrow = dtype == torch.float32 and grad.dtype in LOW_PRECISION
    if grad.dtype != dtype and not narrow:
        raise RuntimeError(
            f"parameter {index} of shape {tuple(param.shape)} is {param.dtype} and has a gradient in {grad.dtype}, "
            "which cannot be fused; do not change its grad_dtype, or use the unfused optimizer"
        )
    if dispatches_in_python(grad):
        raise RuntimeError(
            f"parameter {index} of shape {tuple(param.shape)} is a plain tensor and has a {type(grad).__name__} as "
            "gradient, which cannot be fused; give it a plain tensor (of a DTensor its full_tensor()), or None"
        )
