# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""fp32 masters of low-precision model parameters: making the pairs, and copying values.

Masters take the place of the model's parameters in ``optimizer.param_groups``. They hold the fp32 values that the model
had before it was cast, so nothing is lost by casting, saving or loading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu.amp.flat_model import FlatModel
from apex_npu.amp.shared_memory import sharing_memory
from apex_npu.amp.uncounted_writes import UNCOUNTED_THERE, NewMasters, UncountedWrites
from apex_npu.backends import for_device, is_capturing
from apex_npu.fusion import (
    FusedGroup,
    RoundedCopies,
    WriteTable,
    are_same,
    is_dense,
    low_precision_of,
    not_combinable,
    round_to_copies,
    written_copies,
)

# What a step says, once for each optimizer.
BOTH_WRITTEN = (
    "parameters of the model and their fp32 masters have been written differently since the last step: the values of "
    "the model are trained, and those of the masters are lost. Write to one of them, model.parameters() or "
    "optimizer.param_groups, and call the model in between where both are needed"
)
UNCOUNTED = (
    "fp32 masters, as optimizer.param_groups has them, have been written in a way that autograd's version counter does "
    "not count (.data, numpy, a combined buffer, a collective): their values are trained, except where the model has "
    "been written, too, but the forward before has computed with those of before. Write under torch.no_grad() instead "
    "of through .data"
)
UNSEEN = (
    "fp32 masters, as optimizer.param_groups has them, have been written since the last step, and the model has "
    "not been called since, or is compiled: its parameters, and so this loss, have the values of before. Compiled and "
    "captured forwards do not look for such writes: write to the model's own parameters instead, or call "
    "model.state_dict() after writing"
)

SHARED = (
    "parameters of the model have been given the same memory (p.data = q.data) after amp.initialize: their fp32 "
    "masters are trained apart, and the model has the values of one of them. Use one Parameter for both, before "
    "amp.initialize, or O1 or O4, which have no masters"
)


@dataclass(frozen=True, eq=False)
class MasterPair:
    """A low-precision model parameter and the fp32 parameter that the optimizer steps in its stead."""

    model_param: Tensor
    master_param: Tensor


class MasterParams:
    """The masters of one optimizer.

    What a script writes between two steps counts, whichever of a pair it writes to. What writes is known from version
    counters and addresses, which are recorded when a step has rounded masters into the model; on a CPU also from the
    values that are found there, for writes that are not counted.

    Attributes:
        model_params: Low-precision parameters of the model.
        masters: For each the fp32 parameter that the optimizer steps in its stead.
        first_new: Those before have been compared with what the model held at their first block.
        own_values: Parameters of the model whose float32 values, in masters or remainders, this process had before the
            cast. Until their first block other processes may send rounded ones.
        retired: There are none any more, as their model has been passed to another ``initialize``.
        model_writes: Of ``model_params``, as of the last step.
        master_writes: Of ``masters``, likewise.
        copies: What ``model_params`` were rounded to, where a CPU can tell.
    """

    def __init__(self, pairs: Sequence[MasterPair] = (), *, retired: bool = False) -> None:
        """Of ``pairs``, whose masters have the values of the model; ``retired`` as of the attributes."""
        self.retired = retired
        self.model_params = [pair.model_param for pair in pairs]
        self.masters = [pair.master_param for pair in pairs]
        self.first_new = len(pairs)
        self.own_values: list[Tensor] = []
        self._model_when_shown: dict[int, Tensor] = {}
        self._forget_memory()

    def _forget_memory(self) -> None:
        self._by_id: dict[int, Tensor] = {}
        self._flat_model: FlatModel | None = None
        self.model_writes, self.master_writes = WriteTable(), WriteTable()
        self.copies, self._uncounted, self._new = RoundedCopies(), UncountedWrites(), NewMasters()
        self._written: list[int] = []
        self._moved = self._fused_again = False

    def __getstate__(self) -> dict[str, Any]:
        """Without buffers and what belongs to memory: a copy makes its own."""
        self.write_model(self.model_params)
        names = ("retired", "model_params", "masters", "own_values", "_model_when_shown")
        return {**{name: getattr(self, name) for name in names}, "first_new": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        self.__dict__.update(state)
        self._forget_memory()

    @property
    def pairs(self) -> list[MasterPair]:
        """Both of each."""
        return list(map(MasterPair, self.model_params, self.masters))

    @property
    def are_new(self) -> bool:
        """Some have had no block yet, and take what has been kept of the float32 values of their model parameters."""
        return self.first_new < len(self.masters)

    def belong_to(self, optimizer: Optimizer) -> None:
        """They are those of ``optimizer``, a copy, which is complete."""

    def may_take(self, param: Tensor) -> bool:
        """Whether ``take_values`` has a use for the value of ``param``."""
        return self.of(param) is not None

    def has(self, param: Tensor) -> bool:
        """Whether the optimizer keeps float32 values of ``param``, a parameter of the model."""
        return self.of(param) is not None

    def float32(self, param: Tensor, shown: Tensor) -> Tensor | None:
        """The float32 values of ``param`` on the device of ``shown``, its values in low precision; None: not known.

        It may be the master itself.
        """
        master = self.of(param)
        return None if master is None else fp32_value(shown, master)

    def load(self, param: Tensor, value: Tensor) -> Tensor:
        """Have the master of ``param`` be ``value``; what the parameter is to be given, before ``end_loading``."""
        master = self.of(param)
        assert master is not None
        with torch.no_grad():
            master.copy_(value)
        return value

    def of(self, model_param: Tensor) -> Tensor | None:
        """The master of ``model_param``; None where it has none of these."""
        if len(self._by_id) != len(self.masters):
            self._by_id = dict(zip(map(id, self.model_params), self.masters, strict=True))
        return self._by_id.get(id(model_param))

    def make(self, optimizer: Optimizer, fp32_values: Mapping[int, Tensor] = MappingProxyType({})) -> bool:
        """Put an fp32 master in place of every trainable low-precision parameter of ``optimizer``, state included.

        A parameter that has a master gets that, should a script have put the parameter itself into a group again.

        Args:
            optimizer: Its ``param_groups`` and ``state`` are changed.
            fp32_values: ``id(param)`` → its value before it was cast; others are widened from what they have now.

        Returns:
            True where there are masters that have not followed the model yet.
        """
        for group in optimizer.param_groups:
            indices = low_precision_of(group["params"])
            if indices:
                self._replace(optimizer, group["params"], indices, fp32_values)
        return self.are_new

    def _replace(
        self, optimizer: Optimizer, params: list[Tensor], indices: Sequence[int], fp32_values: Mapping[int, Tensor]
    ) -> None:
        model_params = [p for p in map(params.__getitem__, indices) if p.requires_grad and self.of(p) is None]
        masters: list[Tensor] = [_make_master(p, fp32_values.get(id(p))) for p in model_params]
        # Pairs first, and both columns at once: what an interrupt then leaves to do the next call does.
        self.model_params, self.masters = [*self.model_params, *model_params], [*self.masters, *masters]
        self.own_values = [*self.own_values, *model_params]
        self.model_writes.add(self.model_params)
        self.master_writes.add(self.masters)
        self._note_copies(range(len(self.masters) - len(masters), len(self.masters)))
        for i in indices:
            param = params[i]
            master = self.of(param)
            if master is None:
                continue
            if param in optimizer.state:
                optimizer.state[master] = optimizer.state[param]
                del optimizer.state[param]
            params[i] = master

    def follow(self, optimizer: Optimizer) -> str | None:
        """Follow the model to its device, and to what has been written to it; what is to be warned of."""
        self.follow_devices(optimizer)
        return self.follow_model()

    def follow_devices(self, optimizer: Optimizer) -> None:
        """Move masters, their gradients and their state in ``optimizer`` to where ``Module.to`` has moved the model.

        Raises:
            RuntimeError: Of the parameters on one device some have been moved, and others have not.
        """
        self._check_moved_together()
        known = {id(master): param for master, param in zip(self.masters, self.model_params, strict=True)}
        for group in optimizer.param_groups:
            keeps_steps = not (group.get("capturable") or group.get("fused"))
            for master in group["params"]:
                device = known.get(id(master), master).device
                if device != master.device:
                    _move(master, device)
                    _move_state(optimizer.state.get(master, {}), device, keeps_steps=keeps_steps)

    def _check_moved_together(self) -> None:
        moves = [(m.device, p.device) for m, p in zip(self.masters, self.model_params, strict=True)]
        stayed = {here for here, there in moves if here == there}
        for k, (here, there) in enumerate(moves):
            if here != there and here in stayed:
                raise RuntimeError(
                    f"parameter {k} of those with fp32 masters has been moved from {here} to {there}, and others on "
                    f"{here} have not: masters follow what Module.to moves as a whole. Move the parts before "
                    "amp.initialize, or back"
                )

    @torch.no_grad()
    def follow_model(self) -> str | None:
        """Copy to the masters what has been written to the model; what is to be warned of.

        Elements of the model that are their master's, rounded, leave the master as it is. Until the first block of a
        master, the model has been written where the two differ and it is not known that the master has.
        """
        found = self.model_writes.written(self.model_params)
        of_masters = self.master_writes.written(self.masters)
        uncounted = self.copies.written_copies([self.model_params[k] for k in of_masters])
        shared = self._share_memory(found)
        written = sorted({*self._without_moved(found), *(of_masters[i] for i in uncounted)})
        doubt = self._follow_written(written) if written else None
        new = range(self.first_new, len(self.masters))
        _, params, others = self.copies.take(self.masters[new.start :], self.model_params[new.start :])
        if not {new[i] for i in params}.issubset(of_masters):
            doubt = doubt or UNCOUNTED
        by_value = {new[i] for i in others}.difference(of_masters)
        for k in by_value.difference(self._new.written(self.masters, by_value)):
            follow_(self.masters[k], self.model_params[k], self._model_when_shown.get(k))
        return SHARED if shared else doubt

    def _share_memory(self, written: Sequence[int]) -> bool:
        """Whether a script has given model parameters the memory of others, since the last step."""
        moved = len(written) > len(self.model_writes.counted(self.model_params)) if written else False
        return moved and next(sharing_memory(self.model_params), None) is not None

    @torch.no_grad()
    def take_values(self, fp32_values: Mapping[int, Tensor]) -> None:
        """Give masters that have had no block yet the ``fp32_values`` of their model parameters, by ``id(param)``."""
        new = range(self.first_new, len(self.masters))
        known = [k for k in new if id(self.model_params[k]) in fp32_values]
        for k in known:
            self.masters[k].data.copy_(fp32_values[id(self.model_params[k])])
        self._note_copies(known)

    def end_following(self) -> None:
        """Their first block begins: of later writes to the model, those are followed that are counted."""
        self.first_new, self._model_when_shown, self._new = len(self.masters), {}, NewMasters()

    @torch.no_grad()
    def show_new(self) -> None:
        """A script gets masters that have had no block yet, and may write them: such writes are to stay."""
        for k in range(self.first_new, len(self.masters)):
            follow_(self.masters[k], self.model_params[k], self._model_when_shown.get(k))
            self._model_when_shown[k] = self.model_params[k].detach().clone()
        self._note_copies(range(self.first_new, len(self.masters)))

    def show(self) -> str | None:
        """Masters are about to be read: they get what has been written to the model, where that is counted."""
        return self.follow_model() if self.model_writes.written(self.model_params) else None

    @torch.no_grad()
    def round_own_values(self) -> None:
        """Have the masters of ``own_values`` be what they are in the model."""
        own = set(map(id, self.own_values))
        rounded = [k for k, param in enumerate(self.model_params) if id(param) in own and self._may_agree(k)]
        for k in rounded:
            master, param = self.masters[k], self.model_params[k]
            value = _in_base_format(master).to(param.dtype)  # which a script may have written, and the model lacks
            param.data.copy_(value)
            master.data.copy_(value)
        self._note(rounded)
        self._moved = True  # maybe

    def keep_values_of(self, params: Collection[int]) -> None:
        """The float32 values of ``params``, identities of parameters of the model, are those of all processes."""
        self.own_values = [param for param in self.own_values if id(param) not in params]

    @torch.no_grad()
    def end_broadcast(self) -> None:
        """The model and the masters have the values of another process: what has been written since is to be found."""
        self._model_when_shown = {k: self.model_params[k].detach().clone() for k in self._model_when_shown}
        self._note_copies(range(len(self.masters)))

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Around what gives masters, fused, other addresses: that is no write."""
        written = set(self.master_writes.written(self.masters))
        yield
        moved = [k for k in self.master_writes.written(self.masters) if k not in written]
        self.master_writes.note(self.masters, moved)
        self._fused_again = self._fused_again or bool(moved)

    def take_writes(self, optimizer: Optimizer) -> str | None:
        """Before a step: give masters what has been written to the model since the last; what is to be warned of."""
        found = self.master_writes.written(self.masters)
        self._written = self.master_writes.counted(self.masters) if found else []
        doubt = None
        if found or self.first_new < len(self.masters) or self.model_writes.written(self.model_params):
            doubt = self.follow(optimizer)
            found = self.master_writes.written(self.masters)
        masters_moved = len(found) > len(self._written)
        if self._flat_model is None or self._moved or self._fused_again or masters_moved:
            # Before buffers that the step would look at are replaced, or where parameters have left them.
            _, of_masters, others = self.copies.take(self.masters, self.model_params)
            if self._flat_model is not None and self._moved:
                self.flat_model(self._flat_model.groups)
                self._moved = False
        else:
            _, of_masters, others = self.copies.take(*self._flat_model.loose)
        if others or (self._flat_model is not None and self._flat_model.unwatched):
            doubt = self.look_there(in_step=True) or doubt
        return UNCOUNTED if of_masters and not self._written and not masters_moved else doubt

    def _without_moved(self, written: Sequence[int]) -> list[int]:
        """Of the model parameters that a script has ``written`` not, where that is known, those that it only moved."""
        moved = self._since_rounded(written)[0] if written else ()
        if moved:
            self._note_model(moved)
        return [k for k in written if k not in moved]

    def _since_rounded(self, indices: Sequence[int]) -> tuple[set[int], set[int]]:
        """Of ``indices`` those whose model parameter is as it was rounded, and those whose master is not, on a CPU."""
        left = {} if self._flat_model is None else self._flat_model.places()
        masters, model_params = [self.masters[k] for k in indices], [self.model_params[k] for k in indices]
        places = [left.get(id(master), param) for master, param in zip(masters, model_params, strict=True)]
        same, others = self.copies.since(masters, model_params, places)
        return {indices[i] for i in same}, {indices[i] for i in others}

    def _note_model(self, indices: Collection[int]) -> None:
        self.model_writes.note(self.model_params, sorted(indices))
        self._note_copies(sorted(indices))
        self._moved = True  # maybe

    def look_there(self, *, in_step: bool) -> str | None:
        """Look on accelerators for writes that are not counted; what is to be said of those found by earlier looks."""
        uncounted, flat = self._uncounted, self._flat_model
        if not self.masters:
            return None
        capturing = is_capturing()  # what has come is not asked for then
        if not capturing and uncounted.found():
            return UNCOUNTED_THERE
        due = uncounted.is_due(self.masters[0].device, in_step=in_step)
        if not due or uncounted.is_found or uncounted.passes_over or capturing:
            uncounted.passes_over = False
            return None
        if flat is not None and not self._fused_again and not self.master_writes.written(self.masters):
            uncounted.look_at_buffers(flat.unwatched)
            ids = set(map(id, flat.loose[0]))
            asked = [k for k, master in enumerate(self.masters) if id(master) in ids] if ids else []
        else:
            written = set(self.master_writes.written(self.masters))
            asked = [k for k in range(len(self.masters)) if k not in written]
        asked = [k for k in asked if self._may_agree(k) and self.masters[k].device.type != "cpu"]
        if asked:
            uncounted.look_at_each([self.masters[k] for k in asked], [self.model_params[k] for k in asked])
        return None

    @torch.no_grad()
    def _follow_written(self, written: Sequence[int]) -> str | None:
        """Let masters have what differs, in the model parameters that have been ``written``, from what they hold."""
        conflicts: list[Tensor] = []
        followed = [k for k in written if self._may_agree(k)]
        also = self._since_rounded(followed)[1].union(self.master_writes.written(self.masters))
        also |= self._new.written(self.masters, followed)
        for k in followed:
            differs = follow_(self.masters[k], self.model_params[k], self._model_when_shown.get(k))
            if k in also:
                conflicts.append(differs.any())
        self._note_model(followed)
        return BOTH_WRITTEN if any(map(bool, conflicts)) else None

    def _may_agree(self, k: int) -> bool:
        """A script has not given one of a pair another shape, or another device so far."""
        master, param = self.masters[k], self.model_params[k]
        return master.shape == param.shape and master.device == param.device

    def write_model(self, shown: Collection[Tensor] = ()) -> None:
        """Round masters that have been written since the last step into their model parameters.

        Those stay that have been written themselves; the next step takes them. Nothing is done while a CUDA graph is
        captured.

        Args:
            shown: Model parameters whose masters are about to be shown: what is not counted is looked for in these.
        """
        written = self.master_writes.written(self.masters)
        if shown:
            ids = set(map(id, shown))
            asked = [k for k, param in enumerate(self.model_params) if id(param) in ids]
            pairs = [self.masters[k] for k in asked], [self.model_params[k] for k in asked]
            written = sorted({*written, *(asked[i] for i in self.copies.written_params(*pairs))})
        if not written or is_capturing():
            return
        asked, unlike = self._unlike_model(written)
        copy_masters_to_model([MasterPair(self.model_params[k], self.masters[k]) for k in unlike])
        self._note(asked)

    @torch.no_grad()
    def _unlike_model(self, written: Sequence[int]) -> tuple[list[int], list[int]]:
        """Those of the masters that have been ``written`` whose model parameter has not, and those that differ."""
        found = self.model_writes.written(self.model_params)
        of_model = {*self._without_moved(found), *self.copies.written_copies(self.model_params)}
        asked, differ = [], []
        for k in written:
            master, param = self.masters[k], self.model_params[k]
            if k not in of_model and self._may_agree(k):
                asked.append(k)
                differ.append((_in_base_format(param) != _in_base_format(master).to(param.dtype)).any())
        answers = torch.stack([answer.cpu() for answer in differ]).tolist() if differ else []
        return asked, [k for k, answer in zip(asked, answers, strict=True) if answer]

    def _note(self, indices: list[int]) -> None:
        """Masters and model parameters agree, and none has been written since."""
        self.master_writes.note(self.masters, indices)
        self.model_writes.note(self.model_params, indices)
        self._note_copies(indices)

    def _note_copies(self, indices: Sequence[int]) -> None:
        self.copies.note([self.masters[k] for k in indices], [self.model_params[k] for k in indices])
        self._new.note(self.masters, [k for k in indices if k >= self.first_new])

    def end_loading(self, loaded: Collection[Tensor], *, by_value: bool = False) -> None:
        """Model parameters and masters have been ``loaded``, if they are written: masters have what the model has.

        With ``by_value`` the model's may have been written in a way that is not counted, too.
        """
        ids = set(map(id, loaded))
        of_model = set(self.model_writes.written(self.model_params))
        if by_value:
            others = [k for k, param in enumerate(self.model_params) if id(param) in ids and k not in of_model]
            of_model.update(self._unlike_model(others)[1])
        of_masters = self.master_writes.written(self.masters)
        self.keep_values_of(ids.intersection(id(self.model_params[k]) for k in of_masters))
        written = {k for k in {*of_model, *of_masters} if id(self.model_params[k]) in ids}
        for k in written.intersection(of_model):
            if self._may_agree(k):
                follow_(self.masters[k], self.model_params[k])
        self._note(sorted(written))
        self._moved = True  # maybe

    def begin_block(self, optimizer: Optimizer) -> str | None:
        """Likewise for a block; what is to be warned of, a loss without what has been written to masters included."""
        self._written = self.master_writes.counted(self.masters)
        unseen = bool(self._written) and not is_capturing() and bool(self._unlike_model(self._written)[1])
        doubt = self.follow(optimizer)
        self.end_following()
        if doubt is None and unseen:
            doubt = UNSEEN
        elif doubt is None and not self._written and self.copies.glance(self.masters, self.model_params):
            doubt = UNCOUNTED
        return doubt

    def copy_to_model(self, groups: Sequence[FusedGroup], skipped: Tensor | None = None) -> str | None:
        """Round every master into its model parameter.

        Args:
            groups: The fused groups of the optimizer, if it has any: one copy for each of their buffers.
            skipped: One number on the device; where it is not 0 nothing is written.

        Returns:
            What is to be warned of.
        """
        if not self.masters:
            return None
        uncounted = False
        flat_model = self._flat_model
        try:
            # What has been moved counts as written.
            moved = self.model_writes.write(self.model_params) or self._moved
            if groups:
                if (
                    flat_model is None
                    or moved
                    or not are_same(groups, flat_model.groups)
                    or not are_same(self.masters, flat_model.masters)
                ):
                    flat_model, self._moved = self.flat_model(groups), False
                self._fused_again = False
                uncounted = self._copy_to_buffers(flat_model, skipped)
            else:
                copy_rounded(self.copies, self.masters, self.model_params, skipped)
        except BaseException:
            # What has been written to the model is not a script's: another step copies the masters once more.
            self.model_writes.note(self.model_params)
            self._uncounted.passes_over = True
            raise
        if not groups or (flat_model is not None and flat_model.loose[0]):
            self.model_writes.note(self.model_params)  # torch counts writes to these, too
        if skipped is None or not self._written:
            self.master_writes.note(self.masters)
        else:  # where the step is skipped, the model has yet to get what has been written
            others = sorted(set(range(len(self.masters))).difference(self._written))
            self.master_writes.note(self.masters, others)
        if self.first_new < len(self.masters):  # a step before their first block
            self._new.note(self.masters, range(self.first_new, len(self.masters)))
        return UNCOUNTED if uncounted and not self._written else None

    def _copy_to_buffers(self, flat_model: FlatModel, skipped: Tensor | None) -> bool:
        """Likewise where they are in buffers; True where masters have been found written without a count."""
        uncounted = False
        for group, buffer in flat_model.buffers:
            written = group.model_params() is buffer and buffer.written == len(group.params)
            if not written and (skipped is not None or not round_to_copies(group.param_flat, buffer.flat)):
                write_unless(skipped, buffer.flat, group.param_flat)
            if buffer.kept:
                buffer.release_kept()
            uncounted |= written_copies(buffer.flat)[1] > 0
        if flat_model.loose[0]:
            copy_rounded(self.copies, *flat_model.loose, skipped)
        return uncounted

    def has_flat_model(self, groups: Sequence[FusedGroup]) -> bool:
        """True where ``flat_model`` would move nothing."""
        return self._flat_model is not None and self._flat_model.fits(groups, self.masters)

    def flat_model(self, groups: Sequence[FusedGroup]) -> FlatModel:
        """The model's low-precision parameters, fused like their masters; made again when either has moved."""
        if not self.has_flat_model(groups):
            # First: the memory of others is released as parameters move out.
            kept = [] if self._flat_model is None else self._flat_model.dissolve(groups)
            written = self.model_writes.written(self.model_params)
            self._flat_model = None
            self._flat_model = FlatModel.of(groups, self.masters, self.model_params, kept)
            moved = set(self.model_writes.written(self.model_params)).difference(written)
            self.model_writes.note(self.model_params, sorted(moved))
        assert self._flat_model is not None
        return self._flat_model

    def combined_model(self, groups: Sequence[FusedGroup]) -> list[Tensor]:
        """For each of ``groups``, those of combined buffers, the model's parameters, or those without a master.

        Raises:
            RuntimeError: One shares its memory with others, or is laid out otherwise than its master.
        """
        self.copies.take(self.masters, self.model_params)  # while it is known what has been written
        model = self.flat_model(groups)
        if model.missing():  # what kept it from moving, a graph for one, may be gone
            model.dissolve(())
            self._flat_model = None
            model = self.flat_model(groups)
        for param in model.missing():
            raise not_combinable(param)
        flats = {id(group): buffer.flat for group, buffer in model.buffers}
        return [flats.get(id(group), group.param_flat) for group in groups]


@torch.no_grad()
def fp32_value(value: Tensor, master: Tensor | None) -> Tensor:
    """``value``, in low precision, in float32, on its device: its master's elements where those round to it."""
    if master is None:
        return value.float()
    exact = master.detach().to(value.device)
    # Weights that were written since the last step (a swapped-in moving average) are what is shown.
    rounded = exact.to(value.dtype)
    return exact if torch.equal(rounded, value) else torch.where(rounded == value, exact, value.float())


def _in_base_format(tensor: Tensor) -> Tensor:
    """Not every operator takes an NPU's private formats."""
    return for_device(tensor.device).in_base_format(tensor.detach())


@torch.no_grad()
def follow_(master: Tensor, model_param: Tensor, before: Tensor | None = None) -> Tensor:
    """Copy to ``master`` the elements of ``model_param`` that differ from its rounded ones, and from ``before``.

    Returns:
        Which these are.
    """
    now, held = _in_base_format(model_param), _in_base_format(master)
    differs = now != held.to(now.dtype)
    if before is not None:
        differs &= now != _in_base_format(before)
    # Through .data: this write is none of the script's.
    master.data.copy_(torch.where(differs, now.to(held.dtype), held))
    return differs


def _move(master: Tensor, device: torch.device) -> None:
    grad, master.grad = master.grad, None
    master.data = master.data.to(device)
    if grad is not None:
        master.grad = grad.to(device, master.dtype)  # it may be one of the model's, which masters share


def _move_state(entry: dict[str, Any], device: torch.device, *, keeps_steps: bool) -> None:
    for name, value in entry.items():
        if isinstance(value, Tensor) and not (keeps_steps and name == "step"):  # torch counts on the host
            entry[name] = value.to(device)


def _make_master(param: Tensor, value: Tensor | None) -> nn.Parameter:
    if value is None or value.dtype != torch.float32:
        value = param.detach().float()
    if not is_dense(value.size(), value.stride()):
        value = value.clone()
    return nn.Parameter(value.data)  # with a version counter of its own


def copy_rounded(
    copies: RoundedCopies, masters: list[Tensor], model_params: list[Tensor], skipped: Tensor | None = None
) -> None:
    """Round ``masters`` into ``model_params``, and have ``copies`` remember what is there; ``skipped`` as above."""
    if skipped is None:
        others = copies.write(masters, model_params)
        if not others:
            return
        masters, model_params = [masters[i] for i in others], [model_params[i] for i in others]
    copy_masters_to_model(list(map(MasterPair, model_params, masters)), skipped)


@torch.no_grad()
def copy_masters_to_model(pairs: list[MasterPair], skipped: Tensor | None = None) -> None:
    """Round every master into its model parameter.

    Args:
        pairs: Which.
        skipped: One number on the device; where it is not 0 nothing is written.
    """
    if skipped is not None:
        for pair in pairs:
            write_unless(skipped, pair.model_param, pair.master_param)
    elif pairs:
        torch._foreach_copy_([p.model_param for p in pairs], [p.master_param for p in pairs])


@torch.no_grad()
def write_unless(skipped: Tensor | None, target: Tensor, source: Tensor) -> None:
    """Round ``source`` into ``target``, but where ``skipped``, one number on a device, is there and not 0."""
    if skipped is not None:
        source = torch.where(skipped.to(target.device).reshape(()) != 0, target, source)
    target.copy_(source)
