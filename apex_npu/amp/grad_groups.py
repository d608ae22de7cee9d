# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``GradGroup``: gradients that are unscaled together, on their way from backward to the optimizer's parameters.

There is one class for each place that gradients take: in memory of their own or in one flat buffer, and copied to
masters (``master_grads.py``) or not. ``grad_layout.py`` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from apex_npu.backends import number_on
from apex_npu.distributed import GradReducer
from apex_npu.fusion import FlatGrads, any_grads, extent_numel, overlapping, wraps_tensors
from apex_npu.fusion.grad_slots import InPlace
from apex_npu.fusion.shards import local_part
from apex_npu.ops import unscale_grads


class GradGroup:
    """Gradients of one device and dtype, each in memory of its own, of parameters without masters.

    Attributes:
        params: What the optimizer steps.
        sources: Where autograd leaves their gradients: for a master its model parameter, else the parameter itself.
        direct: The indices of those that are no masters.
        flat: The buffer that the gradients of ``params`` are in; None: each has memory of its own.
        edited: What ``step`` is to warn of; empty: nothing.
        kept_scale: What gradients of masters are multiplied with while a block is open.
    """

    flat: FlatGrads | None = None
    edited = ""
    kept_scale = 1.0

    def __init__(self, params: Sequence[Tensor], sources: Sequence[Tensor] | None = None) -> None:
        """``sources`` run in parallel to ``params``; None: they are the same."""
        self.params = list(params)
        self.sources = list(params if sources is None else sources)
        self.direct: Sequence[int] = range(len(self.params))

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return self.params[0].device

    @property
    def is_aliased(self) -> bool:
        """Whether what is written to gradients of ``sources`` may be written to those of ``params``, too."""
        return False

    @property
    def direct_params(self) -> list[Tensor]:
        """Those of ``params`` that are no masters."""
        params = self.params
        return params if len(self.direct) == len(params) else [params[i] for i in self.direct]

    def begin_block(self, factor: float) -> bool:
        """Bring gradients to the scale of the backward that follows, which adds to them: multiply by ``factor``.

        Returns:
            True where those of model parameters that masters lack are kept until they can be added to the masters'.
        """
        self.scale_sources_(factor)
        return False

    def scale_sources_(self, factor: float) -> None:
        """Multiply the gradients that backward adds to."""
        if factor != 1.0 and any_grads(self.sources):
            self.scale_(factor)

    def scale_all_(self, factor: float) -> None:
        """Multiply the gradients of ``params`` and those that are still to be copied to masters."""
        self.scale_sources_(factor)

    def end_step(self) -> None:
        """Take note that masters have been stepped, and that their gradients are gone."""

    def abandon_block(self, factor: float) -> None:
        """After an exception: multiply the gradients of ``begin_block``, and those added since, by ``factor``."""
        self.scale_sources_(factor)

    def note_delayed(self) -> None:
        """Take note that a later block copies the gradients that backward has left for masters."""

    def drop_cleared(self) -> bool:
        """Clear the gradients of masters whose model parameter's gradient has been cleared; see ``CopiedGrads``.

        Returns:
            True where there is something for ``copy_uncopied``.
        """
        return False

    def copy_uncopied(self, scale: float) -> None:
        """Add the gradients of model parameters that masters lack to the masters', multiplied by ``scale``."""

    def drop_kept(self) -> None:
        """Drop what ``begin_block`` has kept."""

    def forget_copied(self, set_to_none: bool) -> None:
        """Take note that the gradients of masters and of their model parameters have been cleared."""

    def materialize_grads(self) -> None:
        """Give masters that share the model's gradients some of their own."""

    def has_uncopied(self) -> bool:
        """True where a model parameter has a gradient, other than cleared to zeros, that its master lacks."""
        return False

    def note_reduced(self, reducer: GradReducer) -> None:
        """Take note of what ``reducer`` has averaged the model's gradients in, where one copy can take all from it."""

    def part(self, indices: Sequence[int]) -> GradGroup:
        """The same of some of the parameters, each by itself."""
        return GradGroup([self.params[i] for i in indices])

    @torch.no_grad()
    def zero_(self) -> None:
        """Fill the gradients that are there with zeros."""
        for grad in writable_grads({id(t): t for t in (*self.params, *self.sources)}.values()):
            grad.zero_()

    @torch.no_grad()
    def scale_(self, factor: float, found_inf: Tensor | None = None) -> None:
        """Multiply the gradients of ``params``, masters' included, by ``factor``; ``found_inf`` as of ``unscale_``."""
        if factor != 1.0 or found_inf is not None:
            unscale_grads(writable_grads(self.params), factor, found_inf)

    @torch.no_grad()
    def clip_(self, coefficient: Tensor) -> None:
        """Multiply the gradients of ``params`` by ``coefficient``, one number on any device."""
        coefficient = number_on(coefficient.reshape(()), self.device)
        self.materialize_grads()
        # One by one: the padding of a buffer must stay 0, and 0 times a coefficient that is NaN is NaN.
        for grad in writable_grads(self.params):
            grad.mul_(coefficient.to(grad.dtype))

    def has_grads(self) -> bool:
        """True where any gradient is there."""
        return any_grads(self.params) or any_grads(self.sources)

    @torch.no_grad()
    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        """Bring all gradients to ``params``, multiplied by ``inv_scale``.

        Args:
            inv_scale: 1 / loss scale.
            found_inf: float32, one element; set to 1 where a gradient is not finite. None: do not look.
            share: Masters may share the model's gradients, in its dtype, where no conversion is needed.

        Raises:
            RuntimeError: A gradient is sparse, and is to be in a flat buffer.
        """
        # Written, or separated from others in the same memory, so that the next backward may add to them.
        unscale_grads(writable_grads(self.params), inv_scale, found_inf)

    @torch.no_grad()
    def check(self, found_inf: Tensor) -> None:
        """Set ``found_inf``, float32, one element, to 1 where a gradient of ``params`` is not finite."""
        unscale_grads(writable_grads(self.params), 1.0, found_inf)


class FlatGradGroup(GradGroup):
    """The same, of gradients in one flat buffer."""

    flat: FlatGrads

    def __init__(self, flat: FlatGrads, sources: Sequence[Tensor] | None = None) -> None:
        super().__init__(flat.full_params, sources)
        self.flat = flat

    def scale_(self, factor: float, found_inf: Tensor | None = None) -> None:
        self.flat.unscale_(factor, found_inf)

    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        self.flat.unscale_(inv_scale, found_inf)

    @torch.no_grad()
    def check(self, found_inf: Tensor) -> None:
        unscale_grads(self.flat.operands(InPlace.READ), 1.0, found_inf)


def dense_grad(grad: Tensor | None, param: Tensor) -> Tensor:
    """``grad``, which ``param`` has, without its graph.

    Raises:
        RuntimeError: It is sparse.
    """
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has a sparse gradient ({grad.layout}), which cannot be in a "
            "flat buffer: use a layer with sparse=False, or torch.optim.SparseAdam or SGD for it, without combine_grad"
        )
    return grad.detach() if grad.requires_grad else grad


def sparse_grad(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad``, which is sparse, in ``dtype`` and without its graph; each index is in it once."""
    return grad.detach().to(dtype).coalesce()


def _sparse_values(param: Tensor) -> Tensor:
    """The values of the sparse gradient of ``param``, which is coalesced first."""
    assert param.grad is not None
    param.grad = sparse_grad(param.grad, param.grad.dtype)
    return param.grad.values()


def writable_grads(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of ``params``, those that are there, to be written in place.

    Of a sharded parameter it is this process's part: each process unscales its own, and they agree on overflow
    elsewhere. A gradient whose elements share memory, with each other or with those of another, is replaced by a copy:
    autograd leaves two views of one tensor for ``a.view(-1) + b.view(-1)``. A sparse gradient is coalesced, and its
    values are to be written.
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
        found[i].grad = grad.detach().clone()
        grads[i] = local_part(found[i].grad) if grad.layout == torch.strided else _sparse_values(found[i])
    return grads


def _span(grad: Tensor) -> tuple[int, int]:
    """Addresses of the bytes from the first element to the last."""
    if type(grad) is not Tensor and wraps_tensors(grad):
        return -id(grad), 1 - id(grad)  # no memory of its own, but it may be another parameter's gradient, too
    begin = grad.data_ptr()
    if grad.is_contiguous():
        return begin, begin + grad.nbytes
    return begin, begin + extent_numel(grad.size(), grad.stride()) * grad.element_size()


def separate(groups: Sequence[GradGroup]) -> None:
    """Replace gradients that share memory over groups by copies; within a group that is done where they are written."""
    if any(group.flat is None or group.flat.is_sharded for group in groups):
        writable_grads(s for group in groups for p, s in zip(group.params, group.sources, strict=True) if p is s)


def unscale(
    groups: Sequence[GradGroup],
    scale: float,
    *,
    check: bool,
    share: bool = False,
    spare: dict[torch.device, Tensor] | None = None,
) -> list[Tensor]:
    """Bring all gradients to the optimizer's parameters, divided by ``scale``.

    Args:
        groups: Where they are.
        scale: The loss scale.
        check: Look for overflow.
        share: See ``GradGroup.unscale_``.
        spare: Flags that the host has found to be 0, by device. They are taken out: a new one takes a launch.

    Returns:
        What ``any_raised`` takes, where they were checked; else nothing.
    """
    if len(groups) > 1:
        separate(groups)
    flags: dict[torch.device, Tensor] = {}
    for group in groups:
        device = group.device
        if check and device not in flags:
            flag = spare.pop(device, None) if spare else None
            flags[device] = _new_flag(device) if flag is None else flag
        group.unscale_(1.0 / scale, flags.get(device), share=share)
    return list(flags.values())


def look_for_overflow(groups: Sequence[GradGroup]) -> list[Tensor]:
    """Check the gradients of the optimizer's parameters: what ``any_raised`` takes."""
    flags = found_inf_flags(groups)
    for group in groups:
        group.check(flags[group.device])
    return list(flags.values())


def any_raised(flags: Iterable[Tensor]) -> bool:
    """Whether a gradient has overflowed; waits for the device.

    Args:
        flags: One for each device: float32, one element, not 0 where a gradient there is inf or NaN.
    """
    return any(map(bool, flags))


def found_inf_flags(groups: Sequence[GradGroup]) -> dict[torch.device, Tensor]:
    """For each device of ``groups`` a flag that no gradient has overflowed."""
    return {device: _new_flag(device) for device in {group.device for group in groups}}


def _new_flag(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # one that is kept can be written outside of that mode, too
        return torch.zeros(1, dtype=torch.float32, device=device)
