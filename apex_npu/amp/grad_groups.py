# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``GradGroup``: gradients that are unscaled together.

``widened_grads.py`` has the class of those that blocks widen. ``optimizer_grads.py`` chooses the class, and has what is
done to several groups at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from apex_npu.backends import number_on
from apex_npu.fusion import FlatGrads, address_range, any_grads, overlapping, set_grads, wraps_tensors
from apex_npu.fusion.grad_slots import InPlace
from apex_npu.fusion.shards import local_part
from apex_npu.ops import unscale_grads


class GradGroup:
    """Gradients of one device and dtype, in a flat buffer or each in separate memory.

    Attributes:
        params: The parameters that the optimizer steps.
        device: The device of all gradients.
        flat: The buffer with the gradients of ``params``; None: each has separate memory.
        casts_in_backward: Autograd must cast gradients to the dtype of their parameter inside of a block.
    """

    casts_in_backward = False

    def __init__(self, params: Sequence[Tensor], flat: FlatGrads | None = None) -> None:
        self.params, self.flat = list(params), flat
        self.device = self.params[0].device

    def begin_block(self, factor: float, *, fuses: bool) -> bool:
        """Multiply gradients by ``factor``, to the scale of the gradients that backward is about to add.

        Args:
            factor: The loss scale, or its quotient by the scale that the gradients have.
            fuses: The new gradients stay multiplied after the block, so those set aside are multiplied, too.

        Returns:
            True if gradients that no block has checked are set aside.
        """
        self.scale_sources_(factor)
        return False

    def scale_sources_(self, factor: float) -> None:
        """Multiply the gradients to which backward adds by ``factor``."""
        if factor != 1.0 and any_grads(self.params):
            self.scale_(factor)

    def widen(self) -> None:
        """Make 16-bit gradients float32 that blocks or scripts have left, unless ``delay_unscale`` has left them.

        In 16 bits small ones would be lost when they are divided, and norms would be rounded.
        """

    def begin_step(self) -> None:
        """Prepare the gradients for the step of an optimizer that has float32 values."""

    def abandon_block(self, factor: float, *, fuses: bool) -> None:
        """After an exception in the block, undo ``begin_block`` with the inverse of its factor."""
        self.scale_sources_(factor)

    def note_delayed(self) -> None:
        """Take note that a later block unscales the gradients."""

    def drop_cleared(self) -> None:
        """Clear the gradients set aside of parameters whose delayed gradient a script has cleared."""

    def forget(self, set_to_none: bool) -> None:
        """Take note that the gradients of all parameters have been cleared."""

    def part(self, indices: Sequence[int]) -> GradGroup:
        """Return a group of some of the parameters, without a flat buffer."""
        return GradGroup([self.params[i] for i in indices])

    @torch.no_grad()
    def zero_(self) -> None:
        """Fill existing gradients with zeros."""
        for grad in writable_grads(self.params):
            grad.zero_()

    def scale_(self, factor: float, found_inf: Tensor | None = None) -> None:
        """Multiply the gradients of ``params`` by ``factor``; see ``unscale_`` for ``found_inf``."""
        if self.flat is not None:
            self.flat.unscale_(factor, found_inf)
        else:
            with torch.no_grad():  # separates gradients in shared memory, so that the next backward may add to them
                unscale_grads(writable_grads(self.params), factor, found_inf)

    @torch.no_grad()
    def clip_(self, coefficient: Tensor) -> None:
        """Multiply the gradients of ``params`` by ``coefficient``, one number on any device."""
        coefficient = number_on(coefficient.reshape(()), self.device)
        # One by one: the padding of a buffer must stay 0, and 0 times a coefficient that is NaN is NaN.
        for grad in writable_grads(self.params):
            grad.mul_(coefficient.to(grad.dtype))

    def has_grads(self) -> bool:
        """Return True if any gradient exists."""
        return any_grads(self.params)

    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        """Multiply all gradients by ``inv_scale``. Those of 16-bit parameters with masters become float32.

        Args:
            inv_scale: 1 / loss scale.
            found_inf: float32, one element; set to 1 if a gradient is not finite. None: do not check.
            share: Gradients of 16-bit parameters may keep their dtype and memory until the step.

        Raises:
            RuntimeError: A gradient that belongs in a flat buffer is sparse.
        """
        self.scale_(inv_scale, found_inf)

    @torch.no_grad()
    def check(self, found_inf: Tensor) -> None:
        """Set ``found_inf``, float32, one element, to 1 if a gradient of ``params`` is not finite."""
        grads = writable_grads(self.params) if self.flat is None else self.flat.operands(InPlace.READ)
        unscale_grads(grads, 1.0, found_inf)


def dense_grad(grad: Tensor | None, param: Tensor) -> Tensor:
    """Return ``grad``, the gradient of ``param``, without its graph.

    Raises:
        RuntimeError: The gradient is sparse.
    """
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has a sparse gradient ({grad.layout}), which cannot be in a "
            "flat buffer: use a layer with sparse=False, or torch.optim.SparseAdam or SGD for it, without combine_grad"
        )
    return grad.detach() if grad.requires_grad else grad


def sparse_grad(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``grad``, a sparse gradient, in ``dtype``, without its graph and with each index once."""
    return grad.detach().to(dtype).coalesce()


def _sparse_values(param: Tensor) -> Tensor:
    """Coalesce the sparse gradient of ``param`` and return its values."""
    assert param.grad is not None
    coalesced = sparse_grad(param.grad, param.grad.dtype)
    set_grads([param], [coalesced])
    return coalesced.values()


def writable_grads(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the existing gradients of ``params`` as tensors that can be written in place.

    For a sharded parameter this is the part of this process. A gradient whose elements share memory, with each other or
    with another gradient, is replaced by a copy: for ``a.view(-1) + b.view(-1)`` autograd leaves two views of one
    tensor. A sparse gradient is coalesced, and its values are returned.
    """
    found = [p for p in params if p.grad is not None]
    grads = [
        local_part(dense_grad(p.grad, p)) if p.grad.layout == torch.strided else _sparse_values(p)  # type: ignore[union-attr]
        for p in found
    ]
    shared = overlapping([_span(g) for g in grads])
    shared += [i for i, g in enumerate(grads) if not g.is_contiguous() and torch._debug_has_internal_overlap(g)]
    for i in shared:
        grad: Tensor = found[i].grad  # type: ignore[assignment]
        set_grads([found[i]], [grad.detach().clone()])
        grads[i] = local_part(found[i].grad) if grad.layout == torch.strided else _sparse_values(found[i])
    return grads


def _span(grad: Tensor) -> tuple[int, int]:
    """Return the range of addresses from the first element to the last."""
    if type(grad) is not Tensor and wraps_tensors(grad):
        return -id(grad), 1 - id(grad)  # has no memory, but it may also be another parameter's gradient
    return address_range(grad)
