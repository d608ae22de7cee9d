# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The places of many parameters' gradients, found for all at once.

A gradient is NONE while ``param.grad is None``, IN_BUFFER while it is the view of its slot, and else ELSEWHERE. There
it can stay, instead of being copied into its slot, if its elements are in the slot's order, in memory of a CPU or a GPU
that is no slot's: kernels read gradients of any size in place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.fusion.storage import is_slot
from apex_npu.ops import LOW_PRECISION

# The values are those of the extension.
NONE, IN_BUFFER, ELSEWHERE = 0, 1, 2
# From how many elements on one can stay elsewhere.
STAYS_NUMEL = 0
# And where they are multiplied, or shared with masters: smaller ones are multiplied on their way into their slots,
# which is as quick, and found there in one piece by what follows.
WRITTEN_NUMEL = 1 << 12


class InPlace(IntEnum):
    """What is done with gradients that are ELSEWHERE: which of them can stay there depends on it.

    The values are those of the extension.
    """

    NO = 0  # none can
    READ = 1  # those that have not been stepped before: a gradient that is reused is copied into its slot
    WRITE = 2  # those of the slot's dtype that share their memory with nothing else


class GradSlots(Protocol):
    """The slots of one flat buffer of gradients."""

    def remember_views(self, views: Sequence[Tensor]) -> None:
        """Record that ``views`` are in the slots, one in each; one found elsewhere later is an ordinary gradient."""
        ...

    def states(
        self, params: Sequence[Tensor], views: Sequence[Tensor], first: int, in_place: int, least_numel: int
    ) -> tuple[bytes, list[int]]:
        """Where the gradients of ``params`` are, whose slots are those from ``first`` on, and have ``views`` in them.

        Args:
            params: Parameters.
            views: One for each.
            first: The slot of the first.
            in_place: See ``InPlace``.
            least_numel: Only those of so many elements can stay elsewhere.

        Returns:
            One byte for each of ``params``, and the slots of those that are ELSEWHERE and cannot stay there.
        """
        ...

    def grad_list(self, params: Sequence[Tensor], first: int, numel: int, stepped: bool) -> Tensor:
        """The gradients of ``params``, whose slots are those from ``first`` on, as one operand for ``ops``.

        Args:
            params: With gradients that are in their slots or can stay elsewhere, or without.
            first: The slot of the first.
            numel: Of the operand.
            stepped: Remember these as stepped.
        """
        ...

    def share(
        self, sources: Sequence[Tensor], params: Sequence[Tensor], least_numel: int, lazily: bool
    ) -> tuple[bool, list[int]]:
        """Give ``params`` the gradients of ``sources``, without a copy, where that can be.

        Args:
            sources: One for each slot of the buffer: its parameter, or what has the gradient of it as a master.
            params: Likewise.
            least_numel: Only those of so many elements.
            lazily: They are copied when either is written.

        Returns:
            Whether there are any, and the indices of the others.
        """
        ...

    def unscale(
        self, params: list[Tensor], views: list[Tensor], factor: float, found_inf: Tensor | None, least_numel: int
    ) -> bool:
        """Multiply the gradients of ``params``, one for each slot, in one pass; see ``FlatGrads.unscale_``.

        Returns:
            False, with nothing written, where one is neither in its slot, nor can be written where it is, or copied.
        """
        ...

    def forget_stepped(self) -> None:
        """Gradients have been dropped: those to come are others."""
        ...

    def addresses(
        self,
        sources: Sequence[Tensor],
        params: list[Tensor],
        views: list[Tensor],
        first: int,
        last: int,
        chosen: Sequence[int] | None,
        flat: Tensor,
        addresses: Tensor,
    ) -> tuple[bytes, list[int], torch.dtype | None, bool]:
        """Write where the gradients of ``sources`` are into ``addresses``, for the slots from ``first`` to ``last``.

        Args:
            sources: One for each slot of the buffer: its parameter, or what has the gradient of it as a master.
            params: Likewise.
            views: Likewise.
            first: The first slot to look at.
            last: One past the last.
            chosen: Take only these of them; None: all.
            flat: The buffer.
            addresses: int64, on the host. Of a gradient with its slot's order of elements, not in ``flat``, it gets the
                address that ``flat`` would have if the gradient were in its slot; 0 of all others.

        Returns:
            One state for each slot that was looked at; the slots that are ELSEWHERE and have no address; the dtype of
            all gradients that have one; and whether each view in a slot that is ELSEWHERE is in its place, and unused.
        """
        ...


def grad_slots(shapes: Sequence[Tensor], offsets: Sequence[int], device: torch.device | None) -> GradSlots:
    """For slots with the sizes, strides and dtype of ``shapes``.

    None can stay elsewhere but those on ``device``, where ``ops.reads_listed``.
    """
    slots: GradSlots = extension.GradSlots(shapes, offsets, device)
    return slots


def places_of(state: int, states: bytes) -> list[int]:
    """The places in ``states`` of those that are ``state``."""
    return [i for i, found in enumerate(states) if found == state] if state in states else []


def stay_elsewhere(states: bytes, to_gather: list[int]) -> bool:
    """True where gradients are left that are ELSEWHERE and not ``to_gather``."""
    return states.count(ELSEWHERE) > len(to_gather)


def with_state(state: int, states: bytes, slots: list[int], first: int = 0) -> bytes:
    """``states``, of the slots from ``first`` on, with ``state`` for ``slots``, which are some that are ELSEWHERE."""
    if not stay_elsewhere(states, slots):
        return states.replace(bytes([ELSEWHERE]), bytes([state]))
    changed = bytearray(states)
    for i in slots:
        changed[i - first] = state
    return bytes(changed)


def stretches(states: bytes, state: int = IN_BUFFER) -> list[range]:
    """Maximal ranges of slots that are in ``state``."""
    return [range(*found.span()) for found in re.finditer(re.escape(bytes([state])) + b"+", states)]


def fits(grad: Tensor, shape: Tensor, dtype: torch.dtype | None = None) -> bool:
    """True where a gradient has its slot's layout, memory of its own, and ``dtype``; None: that of its slot."""
    return (
        grad.layout == torch.strided
        and not dispatches_in_python(grad)
        and not grad.requires_grad  # create_graph=True: writing it would falsify its graph
        and not grad.is_neg()
        and grad.dtype == (dtype or shape.dtype)
        and grad.stride() == shape.stride()
        and not is_slot(grad)  # of another gradient, or a parameter
    )


def dispatches_in_python(tensor: Tensor) -> bool:
    """True for a subclass whose elements are accessible to its own code alone."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def check_grad(index: int, param: Tensor, grad: Tensor | None, dtype: torch.dtype, *, own: bool) -> None:
    """Require a gradient of ``param``, number ``index``, that can be fused: its ``own``, or its model parameter's.

    Raises:
        RuntimeError: It is sparse, neither of its slot's ``dtype`` nor narrower, on another device than the parameter,
            or a subclass such as DTensor.
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
            f"{grad.device}: a part of the model has been moved since its training began. Move parts before "
            "amp.initialize, or the whole model by model.to(device)"
        )
    narrow = dtype == torch.float32 and grad.dtype in LOW_PRECISION
    if own and grad.dtype != dtype and not narrow:
        raise RuntimeError(
            f"parameter {index} of shape {tuple(param.shape)} is {param.dtype} and has a gradient in {grad.dtype}, "
            "which cannot be fused; leave its grad_dtype as it was, or use the unfused optimizer"
        )
    if dispatches_in_python(grad):
        raise RuntimeError(
            f"parameter {index} of shape {tuple(param.shape)} is a plain tensor and has a {type(grad).__name__} as "
            "gradient, which cannot be fused; give it a plain tensor (of a DTensor its full_tensor()), or None"
        )
