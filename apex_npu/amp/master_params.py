# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""fp32 masters of low-precision model parameters: making the pairs, and copying values.

Masters take the place of the model's parameters in ``optimizer.param_groups``. They hold the fp32 values that the model
had before it was cast, so nothing is lost by casting, saving or loading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu.backends import for_device
from apex_npu.fusion import (
    FusedGroup,
    ModelParamBuffer,
    are_same,
    give_own_storages,
    increment_versions,
    is_dense,
    low_precision_of,
    not_combinable,
)


@dataclass(frozen=True, eq=False)
class MasterPair:
    """A low-precision model parameter and the fp32 parameter that the optimizer steps in its stead."""

    model_param: Tensor
    master_param: Tensor


class MasterParams:
    """The masters of one optimizer.

    Attributes:
        model_params: Low-precision parameters of the model.
        masters: For each the fp32 parameter that the optimizer steps in its stead.
        first_new: Those before have been compared with what the model held at their first block.
        retired: There are none any more, as their model has been passed to another ``initialize``.
    """

    def __init__(self, pairs: Sequence[MasterPair] = (), *, retired: bool = False) -> None:
        """Of ``pairs``, whose masters have the values of the model; ``retired`` as of the attributes."""
        self.retired = retired
        self.model_params = [pair.model_param for pair in pairs]
        self.masters = [pair.master_param for pair in pairs]
        self.first_new = len(pairs)
        self._model_when_shown: dict[int, Tensor] = {}
        self._flat_model: FlatModel | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without buffers: a copy makes its own."""
        return {**self.__dict__, "_flat_model": None}

    @property
    def pairs(self) -> list[MasterPair]:
        """Both of each."""
        return list(map(MasterPair, self.model_params, self.masters))

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
        return self.first_new < len(self.masters)

    def _replace(
        self, optimizer: Optimizer, params: list[Tensor], indices: Sequence[int], fp32_values: Mapping[int, Tensor]
    ) -> None:
        known = {id(p): master for p, master in zip(self.model_params, self.masters, strict=True)}
        model_params = [p for p in map(params.__getitem__, indices) if p.requires_grad and id(p) not in known]
        masters = [_make_master(p, fp32_values.get(id(p))) for p in model_params]
        known.update(zip(map(id, model_params), masters, strict=True))
        # Pairs first, and both columns at once: what an interrupt then leaves to do the next call does.
        self.model_params, self.masters = [*self.model_params, *model_params], [*self.masters, *masters]
        for i in indices:
            param = params[i]
            master = known.get(id(param))
            if master is None:
                continue
            if param in optimizer.state:
                optimizer.state[master] = optimizer.state[param]
                del optimizer.state[param]
            params[i] = master

    def follow(self, optimizer: Optimizer) -> None:
        """Follow the model to its device, and those that are new to its values."""
        self.follow_devices(optimizer)
        self.follow_model()

    def follow_devices(self, optimizer: Optimizer) -> None:
        """Move masters, their gradients and their state in ``optimizer`` to where ``Module.to`` has moved the model."""
        known = {id(master): param for master, param in zip(self.masters, self.model_params, strict=True)}
        for group in optimizer.param_groups:
            keeps_steps = not (group.get("capturable") or group.get("fused"))
            for master in group["params"]:
                device = known.get(id(master), master).device
                if device != master.device:
                    _move(master, device)
                    _move_state(optimizer.state.get(master, {}), device, keeps_steps=keeps_steps)

    @torch.no_grad()
    def follow_model(self) -> None:
        """Copy to the masters what has been written to the model since they were made, until their first block ends it.

        Elements of the model that are their master's, rounded, leave the master as it is.
        """
        for k in range(self.first_new, len(self.masters)):
            follow_(self.masters[k], self.model_params[k], self._model_when_shown.get(k))

    def end_following(self) -> None:
        """Their first block begins: later writes to the model are not followed."""
        self.first_new, self._model_when_shown = len(self.masters), {}

    @torch.no_grad()
    def show_new(self) -> None:
        """A script gets masters that have had no block yet, and may write them: such writes are to stay."""
        for k in range(self.first_new, len(self.masters)):
            follow_(self.masters[k], self.model_params[k], self._model_when_shown.get(k))
            self._model_when_shown[k] = self.model_params[k].detach().clone()

    @torch.no_grad()
    def end_broadcast(self) -> None:
        """The model and the masters have the values of another process: what has been written since is to be found."""
        self._model_when_shown = {k: self.model_params[k].detach().clone() for k in self._model_when_shown}

    def copy_to_model(self, groups: Sequence[FusedGroup], skipped: Tensor | None = None) -> None:
        """Round every master into its model parameter.

        Args:
            groups: The fused groups of the optimizer, if it has any: one copy for each of their buffers.
            skipped: One number on the device; where it is not 0 nothing is written.
        """
        if not self.masters:
            return
        if groups:
            flat_model = self._flat_model
            if flat_model is None or not flat_model.fits(groups, self.masters):
                flat_model = self.flat_model(groups)
            flat_model.copy_masters(skipped)
        else:
            copy_masters_to_model(self.pairs, skipped)

    def has_flat_model(self, groups: Sequence[FusedGroup]) -> bool:
        """True where ``flat_model`` would move nothing."""
        return self._flat_model is not None and self._flat_model.fits(groups, self.masters)

    def flat_model(self, groups: Sequence[FusedGroup]) -> FlatModel:
        """The model's low-precision parameters, fused like their masters; made again when either has moved."""
        if not self.has_flat_model(groups):
            # First: the memory of others is released as parameters move out.
            kept = [] if self._flat_model is None else self._flat_model.dissolve(groups)
            self._flat_model = None
            self._flat_model = FlatModel.of(groups, self.pairs, kept)
        assert self._flat_model is not None
        return self._flat_model

    def combined_model(self, groups: Sequence[FusedGroup]) -> list[Tensor]:
        """For each of ``groups``, those of combined buffers, the model's parameters, or those without a master.

        Raises:
            RuntimeError: One shares its memory with others, or is laid out otherwise than its master.
        """
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
def follow_(master: Tensor, model_param: Tensor, before: Tensor | None = None) -> None:
    """Copy to ``master`` the elements of ``model_param`` that differ from its rounded ones, and from ``before``."""
    # Not every operator takes an NPU's private formats.
    now, held = (for_device(t.device).in_base_format(t.detach()) for t in (model_param, master))
    unchanged = now == held.to(now.dtype)
    if before is not None:
        unchanged |= now == for_device(before.device).in_base_format(before)
    # Through .data: forward may have run, and a master shares the version counter of its model parameter.
    master.data.copy_(torch.where(unchanged, held, now.to(held.dtype)))


def _move(master: Tensor, device: torch.device) -> None:
    grad, master.grad = master.grad, None
    master.data = master.data.to(device)
    if grad is not None:
        master.grad = grad.to(device)


def _move_state(entry: dict[str, Any], device: torch.device, *, keeps_steps: bool) -> None:
    for name, value in entry.items():
        if isinstance(value, Tensor) and not (keeps_steps and name == "step"):  # torch counts on the host
            entry[name] = value.to(device)


def _make_master(param: Tensor, value: Tensor | None) -> nn.Parameter:
    if value is None or value.dtype != torch.float32:
        value = param.detach().float()
    if not is_dense(value.size(), value.stride()):
        value = value.clone()
    return nn.Parameter(value)


# A group of masters, and the buffer of their model parameters.
GroupBuffer: TypeAlias = tuple[FusedGroup, ModelParamBuffer]


@dataclass(eq=False)
class FlatModel:
    """A model's low-precision parameters, in buffers laid out like those that a fused optimizer has for their masters.

    Attributes:
        groups: The optimizer's groups that it was made for.
        masters: And the masters.
        buffers: For each group whose masters have such a buffer, the group and the buffer.
        unfused: Pairs whose model parameter cannot move, because its memory is shared with something else.
    """

    groups: list[FusedGroup]
    masters: list[Tensor]
    buffers: list[GroupBuffer]
    unfused: list[MasterPair]

    @classmethod
    def of(
        cls, groups: Sequence[FusedGroup], pairs: Sequence[MasterPair], kept: Sequence[GroupBuffer] = ()
    ) -> FlatModel:
        """Move the model's parameters into buffers, values included; those of ``kept`` are there already."""
        model_param_of = {id(pair.master_param): pair.model_param for pair in pairs}
        known = {id(group): buffer for group, buffer in kept}
        buffers: list[GroupBuffer] = []
        for group in groups:
            buffer = known.get(id(group))
            if buffer is None:
                params = [model_param_of.get(id(p)) for p in group.params]
                buffer = group.add_model_params(params)
            if buffer is not None:
                buffers.append((group, buffer))
        moved = {id(p) for _, buffer in buffers for p in buffer.params}
        unfused = [pair for pair in pairs if id(pair.model_param) not in moved]
        return cls(list(groups), [pair.master_param for pair in pairs], buffers, unfused)

    def fits(self, groups: Sequence[FusedGroup], masters: Sequence[Tensor]) -> bool:
        """False once groups or masters are others, or a model parameter has been moved."""
        if not are_same(groups, self.groups) or not are_same(masters, self.masters):
            return False
        for _, buffer in self.buffers:
            if buffer.kept:
                buffer.release_kept()
            if buffer.table.broken(buffer.params):
                return False
        return True

    def dissolve(self, groups: Sequence[FusedGroup]) -> list[GroupBuffer]:
        """Give up the buffers that do not fit ``groups``, and return those that stay."""
        held = {id(group): buffer for group, buffer in self.buffers if not buffer.table.broken(buffer.params)}
        kept = [(group, held.pop(id(group))) for group in groups if id(group) in held]
        for buffer in held.values():
            give_own_storages(buffer.params)
        return kept

    def missing(self) -> list[Tensor]:
        """The model parameters that are in no buffer, of masters that are stepped."""
        held = {id(p) for group in self.groups for p in group.params}
        return [pair.model_param for pair in self.unfused if id(pair.master_param) in held]

    def copy_masters(self, skipped: Tensor | None = None) -> None:
        """Round every master into its model parameter; see ``copy_masters_to_model``."""
        for group, buffer in self.buffers:
            if group.model_params() is not buffer or buffer.written < len(group.params):
                write_unless(skipped, buffer.flat, group.param_flat)
            increment_versions(buffer.params)
        if self.unfused:
            copy_masters_to_model(self.unfused, skipped)


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
