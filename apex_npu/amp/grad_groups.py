# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``GradGroup``: gradients that are unscaled together, on their way from backward to the optimizer's parameters.

There is one class for each place that gradients take: in memory of their own or in one flat buffer, and copied to
masters or not. ``grad_layout.py`` chooses.

One rule decides about masters: a master's gradient counts as long as its model parameter has the gradient that it was
made from. Clearing the model's, by whatever means, therefore clears the master's: it is dropped, or filled with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import is_

import torch
from torch import Tensor

from apex_npu.backends import number_on
from apex_npu.distributed import GradReducer
from apex_npu.fusion import (
    FlatGrads,
    are_same,
    drop_grads,
    extent_numel,
    grads_of,
    overlapping,
    versions_of,
    wraps_tensors,
    zero_grads,
)
from apex_npu.fusion.grad_slots import IN_BUFFER, NONE, InPlace
from apex_npu.ops import cats_lists, gathers_in_one_pass, takes_grads, unscale_grads
from apex_npu.shards import local_part

_NONE = bytes([NONE])


class CopiedGrads:
    """The gradients of some model parameters, as they were when they were copied to the masters.

    Attributes:
        grads: Empty, or one or None for each.
        delayed: The indices of those that ``delay_unscale`` has left for a later block to copy.
        stepped: The masters have been stepped since: their gradients are gone, the model's are still there.
    """

    def __init__(self, model_params: Sequence[Tensor]) -> None:
        """Of ``model_params``, none so far."""
        self._model_params = list(model_params)
        self.grads: list[Tensor | None] = []
        self._versions: list[int] = []
        self.delayed: set[int] = set()
        self.stepped = False

    def note(self) -> None:
        """Record that all gradients that are there now have been copied."""
        if self.grads:
            self.put_back()
        self._set(grads_of(self._model_params))
        if self.delayed:
            self.delayed = set()

    def _set(self, grads: list[Tensor | None]) -> None:
        versions = versions_of(grads)
        self.grads, self._versions = grads, versions

    def note_delayed(self) -> None:
        """Record that those of the gradients that are there now that have not been copied will be."""
        former, delayed = self.grads, self.delayed
        self.note()
        known = former or [None] * len(self.grads)
        new = {i for i, (now, before) in enumerate(zip(self.grads, known, strict=True)) if now is not before}
        self.delayed = {i for i in new | delayed if self.grads[i] is not None}

    def adopt_from(self, former: Sequence[CopiedGrads]) -> None:
        """Continue with what ``former`` have recorded of these model parameters."""
        self.stepped = any(one.stepped for one in former)
        known = {
            id(param): (grad, version, i in one.delayed)
            for one in former
            for i, (param, grad, version) in enumerate(zip(one._model_params, one.grads, one._versions, strict=False))
        }
        if known:
            entries = [known.get(id(param), (None, 0, False)) for param in self._model_params]
            self.grads, self._versions = [grad for grad, _, _ in entries], [version for _, version, _ in entries]
            self.delayed = {i for i, (_, _, delayed) in enumerate(entries) if delayed}

    def put_aside(self) -> None:
        """Drop what has been copied, so that the next backward does not add to it; see ``put_back``."""
        if self.stepped:
            self.forget()
        if not self.delayed:
            drop_grads(self._model_params)
        else:
            drop_grads([param for i, param in enumerate(self._model_params) if i not in self.delayed])

    def put_back(self) -> None:
        """Give parameters that have no gradient the one that was put aside, whose copy the master still has."""
        for param, grad in zip(self._model_params, self.grads, strict=False):
            if param.grad is None:
                param.grad = grad

    def forget(self) -> None:
        """Record that no gradient counts as copied any more."""
        self.grads, self._versions, self.delayed, self.stepped = [], [], set(), False

    def note_zeros(self) -> None:
        """Record that all gradients have been filled with zeros, and do so with those that are put aside."""
        if self.grads:
            now = grads_of(self._model_params)
            pairs = list(zip(self.grads, now, strict=True))
            aside = [known for known, grad in pairs if known is not None and grad is None]
            if aside:
                torch._foreach_zero_(aside)
            self._set([known if grad is None or known is grad else None for known, grad in pairs])
            self.delayed = set()  # the masters have these zeros

    def note_changed(self) -> tuple[list[int], list[int], bool]:
        """What has become of the gradients since.

        Returns:
            The indices of the parameters whose gradient has been dropped, those of gradients that are zeros now, and
            whether another has been written in place, which its copy does not follow. None is returned twice.
        """
        if not self.grads or self.stepped:
            return [], [], False
        now = grads_of(self._model_params)
        if are_same(now, self.grads) and versions_of(now) == self._versions:
            return [], [], False
        dropped, zeroed, written = self._find_changed(now)
        for i in dropped:
            self.grads[i] = None
        self.delayed.difference_update(dropped)
        return dropped, zeroed, written

    def _find_changed(self, now: list[Tensor | None]) -> tuple[list[int], list[int], bool]:
        copied = [i for i, grad in enumerate(self.grads) if grad is not None]
        written: list[tuple[int, Tensor]] = []
        for i in copied:
            grad = now[i]
            if grad is not None and grad is self.grads[i] and grad._version != self._versions[i]:
                written.append((i, grad))
        # One answer for all: reading each alone would wait for the device each time.
        nonzero = torch.stack([grad.any() for _, grad in written]).tolist() if written else []
        for i, grad in written:
            self._versions[i] = grad._version
        zeroed = [i for (i, _), kept in zip(written, nonzero, strict=True) if not kept]
        return [i for i in copied if now[i] is None], zeroed, len(zeroed) < len(written)

    def lack_any(self) -> bool:
        """True where a model parameter has a gradient that has not been copied."""
        now = grads_of(self._model_params)
        known = self.grads or [None] * len(now)
        return bool(self.delayed) or any(
            grad is not None and grad is not before for grad, before in zip(now, known, strict=True)
        )


class GradGroup:
    """Gradients of one device and dtype, each in memory of its own, of parameters without masters.

    Attributes:
        params: What the optimizer steps.
        sources: Where autograd leaves their gradients: for a master its model parameter, else the parameter itself.
        flat: The buffer that the gradients of ``params`` are in; None: each has memory of its own.
        edited: Gradients of model parameters have been written since they were copied to the masters.
    """

    flat: FlatGrads | None = None
    edited = False

    def __init__(self, params: Sequence[Tensor], sources: Sequence[Tensor] | None = None) -> None:
        """``sources`` run in parallel to ``params``; None: they are the same."""
        self.params = list(params)
        self.sources = list(params if sources is None else sources)

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return self.params[0].device

    def begin_block(self, factor: float) -> None:
        """Bring gradients to the scale of the backward that follows, which adds to them: multiply by ``factor``."""
        self.scale_sources_(factor)

    def scale_sources_(self, factor: float) -> None:
        """Multiply the gradients that backward adds to."""
        if factor != 1.0 and _any_grads(self.sources):
            self.scale_(factor)

    def scale_all_(self, factor: float) -> None:
        """Multiply the gradients of ``params`` and those that are still to be copied to masters."""
        self.scale_(factor)

    def end_step(self) -> None:
        """Take note that masters have been stepped, and that their gradients are gone."""

    def abandon_block(self, factor: float) -> None:
        """After an exception: multiply the gradients of ``begin_block``, and those added since, by ``factor``."""
        self.scale_sources_(factor)

    def note_delayed(self) -> None:
        """Take note that a later block copies the gradients that backward has left for masters."""

    def drop_cleared(self) -> None:
        """Clear the gradients of masters whose model parameter's gradient has been cleared; see ``CopiedGrads``."""

    def forget_copied(self, set_to_none: bool) -> None:
        """Take note that the gradients of masters and of their model parameters have been cleared."""

    def materialize_grads(self) -> None:
        """Give masters that share the model's gradients some of their own."""

    def has_uncopied(self) -> bool:
        """True where a model parameter has a gradient that has not been copied to its master."""
        return False

    def part(self, indices: Sequence[int]) -> GradGroup:
        """The same of some of the parameters, each by itself."""
        params, sources = ([tensors[i] for i in indices] for tensors in (self.params, self.sources))
        return GradGroup(params) if all(map(is_, params, sources)) else MasterGradGroup(params, sources)

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
        return _any_grads(self.params) or _any_grads(self.sources)

    @torch.no_grad()
    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        """Bring all gradients to ``params``, multiplied by ``inv_scale``.

        Args:
            inv_scale: 1 / loss scale.
            found_inf: float32, one element; set to 1 where a gradient is not finite. None: do not look.
            share: Masters may share the model's gradients, in its dtype, where no conversion is needed.

        Raises:
            RuntimeError: A gradient is sparse.
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
        super().__init__(flat.params, sources)
        self.flat = flat

    def scale_(self, factor: float, found_inf: Tensor | None = None) -> None:
        self.flat.unscale_(factor, found_inf)

    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        self.flat.unscale_(inv_scale, found_inf)

    @torch.no_grad()
    def check(self, found_inf: Tensor) -> None:
        unscale_grads(self.flat.operands(InPlace.READ), 1.0, found_inf)


class MasterGradGroup(GradGroup):
    """Gradients of which some are copied from model parameters to masters, each into memory of its own."""

    def __init__(self, params: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """A parameter without a master is its own source."""
        super().__init__(params, sources)
        self._find_masters()

    def _find_masters(self) -> None:
        pairs = enumerate(zip(self.params, self.sources, strict=True))
        self._masters = [i for i, (param, source) in pairs if param is not source]
        self._direct = sorted(set(range(len(self.params))) - set(self._masters))
        self._model_params = [self.sources[i] for i in self._masters]
        self.copied = CopiedGrads(self._model_params)

    def begin_block(self, factor: float) -> None:
        """See ``GradGroup``. The gradients that masters have are not scaled: what is copied is added to them."""
        if self.copied.grads:
            self.drop_cleared()
        self.copied.put_aside()
        if self._direct or self.copied.delayed:
            self.scale_sources_(factor)

    def abandon_block(self, factor: float) -> None:
        self.copied.put_aside()
        self.scale_sources_(factor)
        self.copied.put_back()

    def note_delayed(self) -> None:
        self.copied.note_delayed()

    @torch.no_grad()
    def scale_sources_(self, factor: float) -> None:
        """Multiply the gradients that backward adds to."""
        self._scale_list_(self.sources, factor)

    def scale_all_(self, factor: float) -> None:
        self._scale_list_(self._model_params, factor)
        self.scale_(factor)

    @staticmethod
    def _scale_list_(tensors: Sequence[Tensor], factor: float) -> None:
        if factor != 1.0 and _any_grads(tensors):
            torch._foreach_mul_(writable_grads(tensors), factor)

    def end_step(self) -> None:
        self.copied.stepped = True

    def drop_cleared(self) -> None:
        dropped, zeroed, written = self.copied.note_changed()
        self.edited |= written
        for k in dropped:
            self.params[self._masters[k]].grad = None
        if zeroed:
            zero_grads([self.params[self._masters[k]] for k in zeroed])

    def forget_copied(self, set_to_none: bool) -> None:
        if set_to_none:
            self.copied.forget()
            return
        for k in self.copied.delayed:  # zeros, too
            master = self.params[self._masters[k]]
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        self.copied.note_zeros()

    def has_uncopied(self) -> bool:
        return self.copied.lack_any()

    @torch.no_grad()
    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        self._copy_each(inv_scale, found_inf)
        self.copied.note()

    def _copy_each(self, inv_scale: float, found_inf: Tensor | None) -> None:
        fresh = [i for i in self._masters if self.sources[i].grad is not None]
        later = [i for i in fresh if self.params[i].grad is not None]
        first = [i for i in fresh if self.params[i].grad is None]
        if first:
            grads = self._new_grads(first)
            torch._foreach_copy_(grads, [_dense(self.sources[i].grad, self.sources[i]) for i in first])
            for i, grad in zip(first, grads, strict=True):
                self.params[i].grad = grad
        ready = first + [i for i in self._direct if self.params[i].grad is not None]
        self._scale_some_(ready, inv_scale, found_inf)
        if later:
            # Widened before unscaling: dividing in float16 would lose the small values that the loss scale has saved.
            new = [_dense(self.sources[i].grad, self.sources[i]).to(self.params[i].dtype) for i in later]
            unscale_grads(new, inv_scale, found_inf)
            torch._foreach_add_(writable_grads(self.params[i] for i in later), new)

    def _scale_some_(self, indices: Sequence[int], inv_scale: float, found_inf: Tensor | None) -> None:
        unscale_grads(writable_grads(self.params[i] for i in indices), inv_scale, found_inf)

    def _new_grads(self, indices: list[int]) -> list[Tensor]:
        return [torch.empty_like(self.params[i], requires_grad=False) for i in indices]


class FlatMasterGradGroup(MasterGradGroup):
    """The same, of masters whose gradients are in one flat buffer."""

    flat: FlatGrads

    def __init__(self, flat: FlatGrads, sources: Sequence[Tensor]) -> None:
        super().__init__(flat.params, sources)
        self.flat = flat
        self._shares = False
        self._in_one_pass = takes_grads(self.params[0])
        self._reduced: tuple[FlatGrads, range] | None = None

    def note_reduced(self, reducer: GradReducer) -> None:
        """Remember the buffer that ``reducer`` has averaged the model's gradients in, where one copy can take all."""
        self._reduced = None
        if not gathers_in_one_pass(self.params[0]):
            self._reduced = reducer.gathered(self.sources, self.flat.offsets)

    def materialize_grads(self) -> None:
        if self._shares:
            self.flat.gather()
        self._shares = False

    def adopt_from(self, former: Iterable[GradGroup]) -> None:
        """Continue with what is known of the groups that this one replaces."""
        self._shares = any(getattr(group, "_shares", False) for group in former)

    def scale_(self, factor: float, found_inf: Tensor | None = None) -> None:
        if factor != 1.0 or found_inf is not None:
            self.flat.unscale_(factor, found_inf)

    @torch.no_grad()
    def check(self, found_inf: Tensor) -> None:
        unscale_grads(self.flat.operands(InPlace.READ), 1.0, found_inf)

    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        """See ``GradGroup``. Where no master has a gradient yet, all are copied in few passes."""
        states = self.flat.states()
        # No master has a gradient: none at all is there, or those of parameters without a master alone.
        first = not states.strip(_NONE) or all(states[i] == NONE for i in self._masters)
        if first and self._in_one_pass:
            self._take_in_one_pass(inv_scale, found_inf, share)
        else:
            self._take_in_passes(states, inv_scale, found_inf, first)
        self.copied.note()

    @torch.no_grad()
    def _take_in_passes(self, states: bytes, inv_scale: float, found_inf: Tensor | None, first: bool) -> None:
        if not first or not self._take_all(states, inv_scale, found_inf):
            self.flat.gather()
            self._copy_each(inv_scale, found_inf)

    def _take_all(self, states: bytes, inv_scale: float, found_inf: Tensor | None) -> bool:
        if self._reduced is not None and self._take_reduced(*self._reduced):
            unscale_grads([self.flat.flat], inv_scale, found_inf)
        elif cats_lists(self.device):
            self.flat.take(self.sources, slots=[i for i, state in enumerate(states) if state != IN_BUFFER])
            self.flat.unscale_(inv_scale, found_inf)
        else:
            return False
        return True

    def _take_in_one_pass(self, inv_scale: float, found_inf: Tensor | None, share: bool) -> None:
        """Gather, widen, unscale and check in one pass, or share."""
        if self._direct:
            self.flat.unscale_(inv_scale, found_inf)  # masters have none yet
        if share and inv_scale == 1.0 and found_inf is None:
            self.flat.share(self.sources)
            self._shares = True
        else:
            self.flat.take(self.sources, inv_scale, found_inf, self._masters if self._direct else None)

    def _take_reduced(self, source: FlatGrads, slots: range) -> bool:
        """Copy gradients that are contiguous already, by one copy."""
        part = source.span(slots)
        if self._direct or not source.all_present(slots) or part.numel() != self.flat.flat.numel():
            return False
        views = self.flat.views
        self.flat.flat.copy_(part)
        for param, view in zip(self.params, views, strict=True):
            param.grad = view
        return True

    def _scale_some_(self, indices: Sequence[int], inv_scale: float, found_inf: Tensor | None) -> None:
        if len(indices) == len(self.params):
            unscale_grads([self.flat.flat], inv_scale, found_inf)
        else:
            super()._scale_some_(indices, inv_scale, found_inf)

    def _new_grads(self, indices: list[int]) -> list[Tensor]:
        views = self.flat.views
        return [views[i] for i in indices]


def _any_grads(tensors: Sequence[Tensor]) -> bool:
    return not all(map(is_, grads_of(list(tensors)), repeat(None)))


def _dense(grad: Tensor | None, param: Tensor) -> Tensor:
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has a sparse gradient ({grad.layout}), which amp cannot "
            "unscale; use a layer with sparse=False, or leave it to an optimizer that is not passed to amp"
        )
    return grad.detach() if grad.requires_grad else grad


def writable_grads(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of ``params``, those that are there, to be written in place.

    Of a sharded parameter it is this process's part: each process unscales its own, and they agree on overflow
    elsewhere. A gradient whose elements share memory, with each other or with those of another, is replaced by a copy:
    autograd leaves two views of one tensor for ``a.view(-1) + b.view(-1)``.
    """
    found = [p for p in params if p.grad is not None]
    grads = [local_part(_dense(p.grad, p)) for p in found]
    shared = overlapping([_span(g) for g in grads])
    shared += [i for i, g in enumerate(grads) if not g.is_contiguous() and torch._debug_has_internal_overlap(g)]
    for i in shared:
        copy = _dense(found[i].grad, found[i]).clone()
        found[i].grad, grads[i] = copy, local_part(copy)
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
    if any(group.flat is None for group in groups):
        writable_grads(s for group in groups for p, s in zip(group.params, group.sources, strict=True) if p is s)


def unscale(groups: Sequence[GradGroup], scale: float, *, check: bool, share: bool = False) -> list[Tensor]:
    """Bring all gradients to the optimizer's parameters, divided by ``scale``.

    Args:
        groups: Where they are.
        scale: The loss scale.
        check: Look for overflow.
        share: See ``GradGroup.unscale_``.

    Returns:
        What ``any_raised`` takes, where they were checked; else nothing.
    """
    if len(groups) > 1:
        separate(groups)
    flags: dict[torch.device, Tensor] = {}
    for group in groups:
        device = group.device
        if check and device not in flags:
            flags[device] = torch.zeros(1, dtype=torch.float32, device=device)
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
    devices = {group.device for group in groups}
    return {device: torch.zeros(1, dtype=torch.float32, device=device) for device in devices}
