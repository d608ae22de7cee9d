# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients on their way to fp32 masters: ``CopiedGrads``, what has been copied, and the groups that copy.

One rule decides about masters: a master's gradient counts as long as its model parameter has the gradient that it was
made from. Clearing the model's, by whatever means, therefore clears the master's: it is dropped, or filled with zeros.
A gradient that a model parameter has got outside of blocks, and that its master lacks, is added to the master's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import compress, count, repeat
from operator import is_, is_not, ne
from typing import NamedTuple

import torch
from torch import Tensor

from apex_npu.amp.clip_guard import SHARED_WRITTEN, WRITTEN
from apex_npu.amp.grad_groups import GradGroup, dense_grad, sparse_grad, writable_grads
from apex_npu.distributed import GradReducer
from apex_npu.fusion import (
    FlatGrads,
    any_grads,
    are_same,
    drop_grads,
    grads_of,
    hold_grads,
    versions_of,
    zero_grads,
)
from apex_npu.fusion.grad_slots import ELSEWHERE, IN_BUFFER, InPlace
from apex_npu.ops import cats_lists, gathers_in_one_pass, takes_grads, unscale_grads

GIVEN_BEFORE_BLOCK = (
    "gradients that were assigned to fp32 masters, and whose model parameters' gradients have been cleared, were "
    "dropped by the next amp.scale_loss, since they may have been assigned before that. Clear gradients with "
    "optimizer.zero_grad(), or assign those of masters after the block"
)


class Changes(NamedTuple):
    """What has become of the gradients of model parameters since they were copied.

    Attributes:
        dropped: The indices of those whose copy does not count any more.
        zeroed: The indices of those that have been filled with zeros.
        written: The indices of others that have been written in place, or replaced, which their copies do not follow.
        added: There are some that have not been copied.
    """

    dropped: Sequence[int] = ()
    zeroed: Sequence[int] = ()
    written: Sequence[int] = ()
    added: bool = False


_NOTHING = Changes()


class CopiedGrads:
    """The gradients of some model parameters, as they were when they were copied to the masters.

    Attributes:
        grads: Empty, or one or None for each.
        delayed: The indices of those that ``delay_unscale`` has left for a later block to copy.
        zeros: The indices of those that were filled with zeros, of which masters may have no copy: until they are None.
        kept: The indices of those that a block has put aside, and that masters have no copy of.
        alike: The indices of those that were copied outside of blocks to masters that had none: any change is followed.
        replaceable: All that the masters have is copied from these, unscaled: others may take their place.
        stepped: The masters have been stepped since: their gradients are gone, the model's are still there.
    """

    def __init__(self, model_params: Sequence[Tensor]) -> None:
        """Of ``model_params``, none so far."""
        self._model_params = list(model_params)
        self._none: list[Tensor | None] = [None] * len(self._model_params)
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}  # of what is aside, and a backward writes: it, and a copy
        self.forget()

    def forget(self) -> None:
        """Record that no gradient counts as copied any more."""
        self.grads: list[Tensor | None] = []
        self._versions: list[int] = []
        self.delayed: set[int] = set()
        self.zeros: set[int] = set()
        self.kept: set[int] = set()
        self.alike: set[int] = set()
        self.stepped = self.replaceable = False

    def note(self) -> None:
        """Record that all gradients that are there now have been copied."""
        # What has been put aside, and no backward has reached, stays.
        self.zeros = self.zeros & self.put_back() if self.grads else set()
        self._set(grads_of(self._model_params))
        self.delayed, self.kept, self.alike = set(), set(), set()

    def _set(self, grads: list[Tensor | None]) -> None:
        versions = versions_of(grads)
        self.grads, self._versions = grads, versions

    def note_delayed(self) -> None:
        """Record that those of the gradients that are there now that have not been copied will be."""
        former, delayed, zeros = self.grads, self.delayed, self.zeros
        self.note()
        known = former or self._none
        new = {i for i, (now, before) in enumerate(zip(self.grads, known, strict=True)) if now is not before}
        self.zeros = zeros - new
        self.delayed = {i for i in new | delayed if self.grads[i] is not None}

    def note_added(self, indices: Collection[int]) -> None:
        """Record that the gradients of ``indices`` that are there now have been copied, too."""
        if not self.grads:
            self._set(list(self._none))
        now = grads_of(self._model_params)
        if self.zeros:
            self.zeros.difference_update(self._changed(now).intersection(indices))
        if len(indices) == len(now):
            self._set(now)
            return
        for i in indices:
            grad = now[i]
            self.grads[i], self._versions[i] = grad, 0 if grad is None else grad._version

    def _changed(self, now: list[Tensor | None]) -> set[int]:
        """The indices where ``now`` has another gradient than has been copied, or that one has been written since."""
        versions = versions_of(self.grads)
        written = [] if versions == self._versions else _where(map(ne, versions, self._versions))
        return {i for i in written if self.grads[i] is not None}.union(_where(map(is_not, now, self.grads)))

    def adopt_from(self, former: Sequence[CopiedGrads]) -> None:
        """Continue with what ``former`` have recorded of these model parameters."""
        places = {id(param): (one, i) for one in former for i, param in enumerate(one._model_params)}
        self.stepped = any(one.stepped for one in former)
        self._set(list(self._none))
        for k, param in enumerate(self._model_params):
            one, i = places.get(id(param), (None, k))
            if one is not None and one.grads:
                self.grads[k], self._versions[k] = one.grads[i], one._versions[i]
                for name in ("delayed", "zeros", "kept", "alike"):
                    if i in getattr(one, name):
                        getattr(self, name).add(k)

    def uncopied(self) -> list[int]:
        """The indices of the gradients that are there, and that neither have been copied nor are delayed."""
        now, known = grads_of(self._model_params), self.grads or self._none
        new = [i for i in _where(map(is_not, now, known)) if known[i] is None or self.stepped]
        return sorted(self.zeros.union(new) - self.delayed - _absent(now))

    def put_aside(self) -> None:
        """Drop what is there, so that the next backward does not add to it, but for what is delayed; see ``put_back``.

        What has not been copied is ``kept``.
        """
        if any_grads(self._model_params):
            now = grads_of(self._model_params)
            self._keep([] if are_same(now, self.grads) and not self.zeros else self.uncopied())
            self.drop()
        elif self.stepped:
            self.forget()

    def _keep(self, indices: list[int]) -> None:
        zeros = self.zeros.intersection(indices)
        if zeros:
            zeros -= self._changed(self.grads)
        if self.stepped:
            self.forget()
        if indices:
            self.note_added(indices)
            self.kept, self.zeros = set(indices), zeros

    def drop(self) -> None:
        """Drop what is there, but for what is delayed."""
        if not self.delayed:
            drop_grads(self._model_params)
        else:
            drop_grads([param for i, param in enumerate(self._model_params) if i not in self.delayed])

    def put_back(self) -> set[int]:
        """Give parameters that have no gradient the one that was put aside; the indices of these parameters."""
        absent = _absent(grads_of(self._model_params))
        for i in absent:
            self._model_params[i].grad = self.grads[i]
        return absent

    def save_put_aside(self) -> None:
        """Copy what has been put aside: the next backward writes to its memory."""
        absent = _absent(grads_of(self._model_params)) if self.grads else set()
        self._saved = {i: (grad, grad.detach().clone()) for i in absent if (grad := self.grads[i]) is not None}

    def restore_put_aside(self, *, ended: bool) -> None:
        """After that backward, which has ``ended``, or failed: give it the values that were saved."""
        now = grads_of(self._model_params)
        for i, (grad, saved) in self._saved.items() if self.grads else ():  # a script may have cleared all
            if ended and now[i] is not None:
                self.grads[i] = saved
            else:
                grad.data.copy_(saved)
        self._saved = {}

    def forget_kept(self) -> None:
        """Record that what was ``kept`` has been put back without having been copied."""
        for i in self.kept - self.zeros:
            self.grads[i] = None
        self.kept = set()

    def note_zeros(self) -> None:
        """Record that all gradients have been filled with zeros, masters' too, and do so with those put aside."""
        now = grads_of(self._model_params)
        aside = {i: known for i in _absent(now) if (known := (self.grads or self._none)[i]) is not None}
        if aside:
            torch._foreach_zero_([*aside.values(), *(saved for _, saved in self._saved.values())])
        for i, grad in aside.items():
            now[i] = grad
        self._set(now)
        self.delayed, self.stepped = set(), False
        self.zeros, self.alike = set(range(len(self.grads))) - _absent(self.grads), set()

    def note_changed(self) -> Changes:
        """What has become of the gradients since; ``dropped`` and ``zeroed`` are returned once."""
        if not self.grads:
            return Changes(added=True) if any_grads(self._model_params) else _NOTHING
        if hold_grads(self._model_params, self.grads, self._versions):
            return _NOTHING
        return self._find_changed(grads_of(self._model_params))

    def _find_changed(self, now: list[Tensor | None]) -> Changes:
        dropped: list[int] = []
        written: list[tuple[int, Tensor]] = []
        followed = self.alike | self.zeros
        others: list[int] = []
        for i in sorted(self._changed(now)):
            grad, before = now[i], self.grads[i]
            if before is None:
                continue
            if self.stepped and grad is not before and i not in self.zeros:
                self.grads[i] = None  # masters have none by now
            elif grad is before:
                written.append((i, before))
            elif grad is None or ((self.replaceable or i in followed) and i not in self.delayed):
                dropped.append(i)
            elif i not in self.delayed:
                others.append(i)
        # One answer for all: reading each alone would wait for the device each time.
        nonzero = torch.stack([grad.any() for _, grad in written]).tolist() if written else []
        zeroed = [i for (i, _), kept in zip(written, nonzero, strict=True) if not kept]
        nonzeros = [i for (i, _), kept in zip(written, nonzero, strict=True) if kept]
        added_to = [i for i in nonzeros if i in followed]
        others += [i for i in nonzeros if i not in followed]
        self.note_added([i for i, _ in written])
        dropped += added_to
        for i in dropped:
            self.grads[i] = None
        self.delayed.difference_update(dropped)
        self.zeros.difference_update(dropped)
        self.alike.difference_update(dropped)
        return Changes(dropped, zeroed, others, bool(self.uncopied()))


def _where(flags: Iterable[bool]) -> list[int]:
    """The indices of those that are true."""
    return list(compress(count(), flags))


def _absent(grads: Sequence[Tensor | None]) -> set[int]:
    """The indices of those that are None."""
    return set(_where(map(is_, grads, repeat(None))))


class MasterGradGroup(GradGroup):
    """Gradients of which some are copied from model parameters to masters, each into memory of its own."""

    def __init__(self, params: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """A parameter without a master is its own source."""
        super().__init__(params, sources)
        self._find_masters()

    def _find_masters(self) -> None:
        pairs = enumerate(zip(self.params, self.sources, strict=True))
        self._masters = [i for i, (param, source) in pairs if param is not source]
        self.direct = sorted(set(range(len(self.params))) - set(self._masters))
        self._master_params = [self.params[i] for i in self._masters]
        self._model_params = [self.sources[i] for i in self._masters]
        self.copied = CopiedGrads(self._model_params)
        self._made: dict[int, Tensor | None] = {}
        self._alone = True

    def part(self, indices: Sequence[int]) -> GradGroup:
        params, sources = ([tensors[i] for i in indices] for tensors in (self.params, self.sources))
        return GradGroup(params) if are_same(params, sources) else MasterGradGroup(params, sources)

    def begin_block(self, factor: float) -> bool:
        """See ``GradGroup``. The gradients that masters have are not scaled: what is copied is added to them."""
        if self.copied.grads:
            self._follow(self.copied.note_changed(), GIVEN_BEFORE_BLOCK)
        self.copied.put_aside()
        if self.direct or self.copied.delayed:
            self.scale_sources_(factor)
        return len(self.copied.kept) > len(self.copied.zeros)

    def abandon_block(self, factor: float) -> None:
        self.copied.drop()
        self.scale_sources_(factor)
        if self.copied.grads:
            self.copied.put_back()
        self.copied.forget_kept()

    def note_delayed(self) -> None:
        if self.copied.kept:
            self._add_kept(self.kept_scale)
        self.copied.note_delayed()

    def begin_in_buckets(self) -> None:
        """Before a backward that writes buckets: copy what masters share with them, and what has been put aside."""
        self.materialize_grads()
        self.copied.save_put_aside()

    def end_in_buckets(self) -> None:
        """After it: replace views of buckets by other tensors in the same memory.

        DistributedDataParallel gives a parameter the same view after each backward, and all views of a bucket count
        writes together. New tensors tell gradients of one backward from those of another.
        """
        self.copied.restore_put_aside(ended=True)
        for param in self._model_params:
            if param.grad is not None:
                param.grad = param.grad.data

    @torch.no_grad()
    def scale_sources_(self, factor: float) -> None:
        """Multiply the gradients that backward adds to."""
        self._scale_list_(self.sources, factor)

    def scale_all_(self, factor: float) -> None:
        # All others of the model have been put aside, or are about to be dropped.
        self._scale_list_([self._model_params[i] for i in sorted(self.copied.delayed)], factor)
        if factor != 1.0 and any_grads(self.params):
            self.scale_(factor)

    @staticmethod
    def _scale_list_(tensors: Sequence[Tensor], factor: float) -> None:
        if factor != 1.0 and any_grads(tensors):
            torch._foreach_mul_(writable_grads(tensors), factor)

    def drop_cleared(self) -> bool:
        changes = self.copied.note_changed()
        if changes is not _NOTHING:
            self._follow(changes)
        return changes.added or bool(self.copied.zeros)

    def _follow(self, changes: Changes, given: str = "") -> None:
        """Have masters follow ``changes``; with ``given`` drop what was assigned to them, too, and have that said."""
        if changes.written:
            self.edited = SHARED_WRITTEN if any(map(self._is_shared, changes.written)) else WRITTEN
        for k in changes.dropped:
            if self._has_made(self._masters[k]):
                self.params[self._masters[k]].grad = None
            elif given:
                self.params[self._masters[k]].grad, self.edited = None, given
        for k in changes.zeroed:
            zero_grads([self.params[self._masters[k]]])
            self.copied.delayed.discard(k)  # zeros are the same in every scale
            self.copied.zeros.add(k)

    def _is_shared(self, k: int) -> bool:
        """True where what is written to the gradient of model parameter ``k`` is written to that of its master, too."""
        return False

    def _has_made(self, index: int) -> bool:
        """False where something else has been assigned to the ``grad`` of a master."""
        grad = self.params[index].grad
        return grad is None or grad is self._made.get(index)

    def forget_copied(self, set_to_none: bool) -> None:
        self.edited = ""
        if set_to_none:
            self.copied.forget()
            self._made = {}
        else:
            self.copied.note_zeros()

    def has_uncopied(self) -> bool:
        return not self.copied.zeros.issuperset(self.copied.uncopied())

    @torch.no_grad()
    def copy_uncopied(self, scale: float) -> None:
        found = self.copied.uncopied()
        self.copied.note_added(found)
        self.copied.alike.update(k for k in found if self.params[self._masters[k]].grad is None)
        self._add(found, scale)

    def drop_kept(self) -> None:
        self.copied.forget_kept()

    @torch.no_grad()
    def _add_kept(self, scale: float) -> None:
        # A zero is a gradient where there is no other.
        unread = self.copied.zeros - _absent(grads_of(self._model_params))
        self._add(sorted(self.copied.kept - unread), scale)

    def _add(self, indices: Iterable[int], scale: float) -> None:
        """Add what is recorded as copied to masters, multiplied by ``scale``."""
        for k in indices:
            i = self._masters[k]
            grad, source = self.copied.grads[k], self._model_params[k]
            if grad is not None and grad.layout != torch.strided:
                self._add_sparse(i, sparse_grad(grad, self.params[i].dtype) * scale)
                continue
            wide = dense_grad(grad, source).to(self.params[i].dtype) * scale
            if self.params[i].grad is None:
                self._made[i] = self.params[i].grad = self._new_grads([i])[0].copy_(wide)
            else:
                self.materialize_grads()
                writable_grads([self.params[i]])[0].add_(wide)

    def _add_sparse(self, i: int, wide: Tensor) -> None:
        former = self.params[i].grad
        self._made[i] = self.params[i].grad = wide if former is None else former + wide

    def end_step(self) -> None:
        # Zeros stay gradients, as they stay on the model.
        self.copied.stepped, self.copied.replaceable, self._made = True, False, {}
        self.copied.alike.clear()

    @torch.no_grad()
    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        self._copy_each(inv_scale, found_inf)
        self._made = dict(enumerate(grads_of(self.params)))
        if self.copied.kept:
            self._add_kept(self.kept_scale)
        self.copied.note()
        self.copied.replaceable = self._alone and inv_scale == 1.0 == self.kept_scale

    def adopt_from(self, former: Sequence[GradGroup]) -> None:
        """Continue with what is known of the groups that this one replaces."""
        self.copied.adopt_from([group.copied for group in former if isinstance(group, MasterGradGroup)])
        self.edited = next(filter(None, (group.edited for group in former)), "")
        self._made = dict(enumerate(grads_of(self.params)))

    def _copy_each(self, inv_scale: float, found_inf: Tensor | None) -> None:
        given, held = grads_of(self.sources), grads_of(self.params)
        fresh = [i for i in self._masters if given[i] is not None]
        later = [i for i in fresh if held[i] is not None and given[i].layout == torch.strided]  # type: ignore[union-attr]
        first = [i for i in fresh if held[i] is None and given[i].layout == torch.strided]  # type: ignore[union-attr]
        if len(first) + len(later) < len(fresh):
            self._copy_sparse(set(fresh).difference(first, later), inv_scale, found_inf)
        self._alone = not later and not self.copied.kept
        if first:
            grads = self._new_grads(first)
            torch._foreach_copy_(grads, [dense_grad(given[i], self.sources[i]) for i in first])
            for i, grad in zip(first, grads, strict=True):
                self.params[i].grad = grad
        ready = first + [i for i in self.direct if held[i] is not None]
        self._scale_some_(ready, inv_scale, found_inf)
        if later:
            # Widened before unscaling: dividing in float16 would lose the small values that the loss scale has saved.
            new = [dense_grad(given[i], self.sources[i]).to(self.params[i].dtype) for i in later]
            unscale_grads(new, inv_scale, found_inf)
            torch._foreach_add_(writable_grads(self.params[i] for i in later), new)

    def _copy_sparse(self, indices: Iterable[int], inv_scale: float, found_inf: Tensor | None) -> None:
        for i in indices:
            grad, source = self.sources[i].grad, self.sources[i]
            assert grad is not None
            if self.flat is not None:
                dense_grad(grad, source)  # says that it cannot be in a buffer
            wide = sparse_grad(grad, self.params[i].dtype)
            unscale_grads([wide.values()], inv_scale, found_inf)
            self._add_sparse(i, wide)

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
        self._reduced = None
        if not gathers_in_one_pass(self.params[0]):
            self._reduced = reducer.gathered(self.sources, self.flat.offsets)

    def materialize_grads(self) -> None:
        if self._shares:
            self.flat.gather()
        self._shares = False

    def adopt_from(self, former: Sequence[GradGroup]) -> None:
        super().adopt_from(former)
        self._shares = any(getattr(group, "_shares", False) for group in former)

    def zero_(self) -> None:
        self.materialize_grads()  # first: of gradients that share memory copies would take the place
        super().zero_()

    def scale_(self, factor: float, found_inf: Tensor | None = None) -> None:
        if factor != 1.0 or found_inf is not None:
            self.flat.unscale_(factor, found_inf)

    @property
    def is_aliased(self) -> bool:
        return self._shares and not self.flat.shares_lazily

    def _is_shared(self, k: int) -> bool:
        source, grad = self.copied.grads[k], self.params[self._masters[k]].grad
        if not self.is_aliased or source is None or grad is None or source is not self._model_params[k].grad:
            return False
        return grad.dtype == source.dtype and grad.data_ptr() == source.data_ptr()

    def _has_made(self, index: int) -> bool:
        grad, master = self.params[index].grad, self.params[index]
        shared = grad is not None and grad.dtype != master.dtype
        return super()._has_made(index) or shared or self.flat.states(range(index, index + 1))[0] == IN_BUFFER

    @torch.no_grad()
    def check(self, found_inf: Tensor) -> None:
        unscale_grads(self.flat.operands(InPlace.READ), 1.0, found_inf)

    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        """See ``GradGroup``. Where no master has a gradient yet, all are copied in few passes."""
        first = not any_grads(self._master_params)
        if first:
            self.flat.is_packed = False
        shares = first and share and inv_scale == 1.0 and found_inf is None
        if first and self._in_one_pass:
            self._take_in_one_pass(inv_scale, found_inf, shares)
        elif not (shares and self.flat.pack(self.sources)):
            shares = False
            self._take_in_passes(inv_scale, found_inf, first)
        self._shares = shares
        alone = first and not self.copied.kept
        self._made = {}
        if self.copied.kept:
            self._add_kept(self.kept_scale)
        self.copied.note()
        self.copied.replaceable = alone and inv_scale == 1.0 == self.kept_scale

    @torch.no_grad()
    def _take_in_passes(self, inv_scale: float, found_inf: Tensor | None, first: bool) -> None:
        states = self.flat.states()
        if not first or not self._take_all(states, inv_scale, found_inf):
            if ELSEWHERE in states:
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
        if self.direct:
            self.flat.unscale_(inv_scale, found_inf)  # masters have none yet
        if share:
            self.flat.share(self.sources)
        else:
            self.flat.take(self.sources, inv_scale, found_inf, self._masters if self.direct else None)

    def _take_reduced(self, source: FlatGrads, slots: range) -> bool:
        """Copy gradients that are contiguous already, by one copy."""
        part = source.span(slots)
        if self.direct or not source.all_present(slots) or part.numel() != self.flat.flat.numel():
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
