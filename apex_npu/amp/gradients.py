# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients on their way from backward to the optimizer: scaled up, copied to masters, unscaled, checked.

Between two ``scale_loss`` blocks all gradients are unscaled. Inside one they are scaled: those that are there from an
earlier backward are scaled up on entry, so that autograd can simply add to them, and whoever clears gradients inside
the block does what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from apex_npu.amp.delivered_grads import DeliveredGrads
from apex_npu.backends import for_device, number_on
from apex_npu.fusion import (
    FlatGrads,
    GradReducer,
    drop_grads,
    extent_numel,
    grads_of,
    local_part,
    overlapping,
    wraps_tensors,
)
from apex_npu.fusion.grad_slots import ABSENT, PRESENT, LooseFor
from apex_npu.ops import gathers_in_one_pass, joins_lists, takes_grads, unscale_grads


class GradUnit:
    """Gradients of one device and dtype that are unscaled together.

    Attributes:
        params: What the optimizer steps: masters, or the model's own parameters.
        sources: Where autograd leaves their gradients: for a master its model parameter, else the parameter itself.
        flat: The buffer that the gradients of ``params`` lie in, or None where each has memory of its own.
        gathered: The buffer, and its slots, that the gradients of ``sources`` have been gathered into already, laid out
            like ``flat``; None: they lie anywhere.
    """

    def __init__(self, params: Sequence[Tensor], sources: Sequence[Tensor], flat: FlatGrads | None = None) -> None:
        """``sources`` run in parallel to ``params``."""
        self.params = list(params)
        self.sources = list(sources)
        self.flat = flat
        self.gathered: tuple[FlatGrads, range] | None = None
        pairs = [i for i, (p, s) in enumerate(zip(params, sources, strict=True)) if p is not s]
        self._masters = pairs
        self._direct = sorted(set(range(len(self.params))) - set(pairs))
        self._master_sources = [self.sources[i] for i in pairs]
        self._delivered = DeliveredGrads(self._master_sources)
        self._shares = False

    def note_gathered(self, reducer: GradReducer) -> None:
        """What ``reducer`` has averaged lies together; remember where, if it saves a pass for each parameter."""
        self.gathered = None
        if self.flat is not None and self._masters and not gathers_in_one_pass(self.params[0]):
            self.gathered = reducer.gathered(self.sources, self.flat.offsets)

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return self.params[0].device

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply the gradients that backward is about to add to by ``factor``."""
        if factor == 1.0:
            return
        if self.flat is not None and not self._masters:
            self.flat.unscale_(factor, None)
            return
        grads = _writable(self.sources)
        if grads:
            torch._foreach_mul_(grads, factor)

    @torch.no_grad()
    def zero_(self) -> None:
        """Fill the gradients that are there with zeros."""
        for grad in _writable({id(t): t for t in (*self.params, *self.sources)}.values()):
            grad.zero_()

    @torch.no_grad()
    def scale_params_(self, factor: float, found_inf: Tensor | None = None) -> None:
        """Multiply the gradients of ``params``, masters' included, by ``factor``; ``found_inf`` as of ``unscale_``."""
        if factor == 1.0 and found_inf is None:
            return
        if self.flat is not None:
            self.flat.unscale_(factor, found_inf)
        else:
            unscale_grads(_writable(self.params), factor, found_inf)

    @torch.no_grad()
    def clip_params_(self, coefficient: Tensor) -> None:
        """Multiply the gradients of ``params`` by ``coefficient``, one number on any device."""
        coefficient = number_on(coefficient.reshape(()), self.device)
        self.stop_sharing()
        # One by one: a buffer's padding must stay 0, which times a coefficient that is nan it would not.
        for grad in _writable(self.params):
            grad.mul_(coefficient.to(grad.dtype))

    def take_over(self, former: Sequence[GradUnit]) -> None:
        """Know what ``former``, in whose place this one comes, has brought to masters."""
        self._delivered.note_from(unit._delivered for unit in former)
        self._shares = any(unit._shares for unit in former)

    def forget_cleared(self) -> None:
        """Clear masters' gradients whose model gradient somebody has cleared since it was brought to them."""
        for k in self._delivered.cleared():
            self.params[self._masters[k]].grad = None

    def know_cleared(self, set_to_none: bool) -> None:
        """Masters' gradients have been cleared with their model's: ``forget_cleared`` need not look for that."""
        if set_to_none:
            self._delivered.forget()
        else:
            self._delivered.forget_replaced()

    def drop_source_grads(self) -> None:
        """Forget the gradients of model parameters that have masters: what they held is in the masters'."""
        drop_grads(self._master_sources)
        self._delivered.forget()

    def stop_sharing(self) -> None:
        """Give masters that share the model's gradients some of their own, in their own dtype."""
        if self._shares and self.flat is not None:
            self.flat.gather()
        self._shares = False

    def has_undelivered(self) -> bool:
        """True where a model parameter has a gradient that no scale_loss has brought to its master."""
        return self._delivered.lack_any()

    def has_grads(self) -> bool:
        """True where any gradient is there."""
        return bool(_with_grads(self.params)) or bool(_with_grads(self.sources))

    @torch.no_grad()
    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        """Bring all gradients to ``params``, multiplied by ``inv_scale``.

        Args:
            inv_scale: 1 / loss scale.
            found_inf: float32, one element; set to 1 where a gradient is not finite. None: do not look.
            share: Where nothing is asked of them, masters may have the very gradients of their model, in its dtype.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        if self.flat is not None and not self._masters:
            self.flat.unscale_(inv_scale, found_inf)
            return
        if self.flat is not None and self._take_all(self.flat, inv_scale, found_inf, share=share):
            return
        if self.flat is not None and self._widen_all(self.flat):
            unscale_grads([self.flat.flat], inv_scale, found_inf)
            return
        if self.flat is not None and self._join_all(self.flat):
            self.flat.unscale_(inv_scale, found_inf)
            return
        if self.flat is not None:
            self.flat.gather()
        fresh = [i for i in self._masters if self.sources[i].grad is not None]
        later = [i for i in fresh if self.params[i].grad is not None]
        first = [i for i in fresh if self.params[i].grad is None]
        if first:
            grads = self._new_grads(first)
            torch._foreach_copy_(grads, [_dense(self.sources[i].grad, self.sources[i]) for i in first])
            for i, grad in zip(first, grads, strict=True):
                self.params[i].grad = grad
        ready = first + [i for i in self._direct if self.params[i].grad is not None]
        if self.flat is not None and len(ready) == len(self.params):
            unscale_grads([self.flat.flat], inv_scale, found_inf)
        else:
            unscale_grads(_writable(self.params[i] for i in ready), inv_scale, found_inf)
        if later:
            # Widened before unscaling: dividing in float16 would lose the small values that the loss scale has saved.
            new = [_dense(self.sources[i].grad, self.sources[i]).to(self.params[i].dtype) for i in later]
            unscale_grads(new, inv_scale, found_inf)
            torch._foreach_add_(_writable(self.params[i] for i in later), new)
        self._delivered.note()

    @torch.no_grad()
    def check(self, found_inf: Tensor) -> None:
        """Set ``found_inf``, float32, one element, to 1 where a gradient of ``params`` is not finite."""
        if self.flat is not None:
            unscale_grads(self.flat.operands(LooseFor.READING), 1.0, found_inf)
        else:
            unscale_grads(_writable(self.params), 1.0, found_inf)

    def _take_all(self, flat: FlatGrads, inv_scale: float, found_inf: Tensor | None, *, share: bool) -> bool:
        """Where no master has a gradient yet, gather, widen, unscale and check in one pass, or share."""
        if not takes_grads(self.params[0]):
            return False
        states = flat.states()
        if any(states) if not self._direct else any(states[i] != ABSENT for i in self._masters):
            return False
        if self._direct:
            flat.unscale_(inv_scale, found_inf)  # masters have none yet
        if share and inv_scale == 1.0 and found_inf is None:
            flat.share(self.sources)
            self._shares = True
        else:
            flat.take(self.sources, inv_scale, found_inf, self._masters if self._direct else None)
        self._delivered.note()
        return True

    def _widen_all(self, flat: FlatGrads) -> bool:
        """Where gradients of masters' sources lie together already, bring all of them over by one copy."""
        if self.gathered is None or self._direct or flat.states().strip(bytes([ABSENT])):
            return False
        source, slots = self.gathered
        part = source.span(slots)
        if not source.all_present(slots) or part.numel() != flat.flat.numel():
            return False
        flat.flat.copy_(part)
        for param, view in zip(self.params, flat.views, strict=True):
            param.grad = view
        self._delivered.note()
        return True

    def _join_all(self, flat: FlatGrads) -> bool:
        """Where no master has a gradient yet, and a list is joined in one launch, bring all over by that."""
        if not joins_lists(self.device):
            return False
        states = flat.states()
        if any(states[i] != ABSENT for i in self._masters):
            return False
        flat.take(self.sources, slots=[i for i, state in enumerate(states) if state != PRESENT])
        self._delivered.note()
        return True

    def _new_grads(self, indices: list[int]) -> list[Tensor]:
        if self.flat is not None:
            views = self.flat.views
            return [views[i] for i in indices]
        return [torch.empty_like(self.params[i], requires_grad=False) for i in indices]


def _with_grads(tensors: list[Tensor]) -> list[Tensor]:
    return [t for t, grad in zip(tensors, grads_of(tensors), strict=True) if grad is not None]


def _dense(grad: Tensor | None, param: Tensor) -> Tensor:
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has a sparse gradient ({grad.layout}), which amp cannot "
            "unscale; use a layer with sparse=False, or leave it to an optimizer that amp does not know"
        )
    return grad.detach() if grad.requires_grad else grad


def _writable(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of ``params``, those that are there, to be written in place.

    Of a sharded one this process's part: each process unscales its own, and they agree on overflow elsewhere. One whose
    elements share memory, with each other or with those of another, is replaced by a copy: autograd leaves two as views
    of one tensor for ``a.view(-1) + b.view(-1)``.
    """
    found = _with_grads(list(params))
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


def separate(units: Sequence[GradUnit]) -> None:
    """Replace gradients that share memory over units by copies; within a unit that is done where they are written."""
    if len(units) > 1 and any(unit.flat is None for unit in units):
        _writable(unit.params[i] for unit in units for i in unit._direct)


def clear_overflow_flags(units: Sequence[GradUnit]) -> None:
    """Before a backward: devices that saturate instead of giving inf forget what has overflowed so far."""
    for device in {unit.device for unit in units}:
        backend = for_device(device)
        if backend.saturates():
            backend.clear_overflow_flag(device)


def unscale_units(units: Sequence[GradUnit], scale: float, *, check: bool, share: bool = False) -> list[Tensor]:
    """Bring all gradients to the optimizer's parameters, divided by ``scale``.

    Args:
        units: Where they are.
        scale: The loss scale.
        check: Look for overflow.
        share: See ``GradUnit.unscale_``.

    Returns:
        What ``any_raised`` takes, where they were looked at; else nothing.
    """
    separate(units)
    flags = _flags(units) if check else {}
    for unit in units:
        unit.unscale_(1.0 / scale, flags.get(unit.device), share=share)
    return list(flags.values())


def look_for_overflow(units: Sequence[GradUnit]) -> list[Tensor]:
    """Look at the gradients of the optimizer's parameters: what ``any_raised`` takes."""
    flags = _flags(units)
    for unit in units:
        unit.check(flags[unit.device])
    return list(flags.values())


def gather_joined(units: Sequence[GradUnit]) -> None:
    """Where gradients are gathered anyway, gather all: one that cannot be raises before any has been written."""
    for unit in units:
        if unit.flat is not None and joins_lists(unit.device):
            unit.flat.gather()


def scale_and_look(units: Sequence[GradUnit], factor: float) -> list[Tensor]:
    """``look_for_overflow``, while what is looked at is multiplied by ``factor``."""
    gather_joined(units)
    flags = _flags(units)
    for unit in units:
        unit.scale_params_(factor, flags[unit.device])
    return list(flags.values())


def any_raised(flags: Sequence[Tensor]) -> bool:
    """Whether a gradient has overflowed; waits for the device, once.

    Args:
        flags: One for each device: float32, one element, not 0 where a gradient there is inf or nan.
    """
    found_inf = False
    for flag in flags:
        backend = for_device(flag.device)
        overflowed = backend.overflow_flag(flag.device) if backend.saturates() else False
        found_inf |= overflowed or bool(flag)
    return found_inf


def _flags(units: Sequence[GradUnit]) -> dict[torch.device, Tensor]:
    devices = {unit.device for unit in units}
    return {device: torch.zeros(1, dtype=torch.float32, device=device) for device in devices}
