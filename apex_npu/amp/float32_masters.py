# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Float32Masters``: float32 values of 16-bit parameters, which an optimizer steps instead of the parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.amp.masters import Masters, fp32_value, fused_groups
from apex_npu.amp.session import current, warn_once
from apex_npu.backends import HostCopy, is_capturing
from apex_npu.backends._torch_private import labelled
from apex_npu.fusion import (
    FusedGroup,
    ModelParamBuffer,
    WriteTable,
    are_same,
    increment_versions,
    is_dense,
    low_precision_of,
    not_combinable,
    swap_data,
)
from apex_npu.fusion.flat_buffer import leave_private_formats

# A warning of step().
UNCOUNTED = (
    "16-bit parameters have been written in a way that autograd's version counter does not count (.data, a "
    "collective). amp does not detect such writes on an NPU, and a step overwrites them with the rounded float32 "
    "values. Write under torch.no_grad() instead of through .data"
)

# The number of elements that ``_take_differing`` compares at once.
_CHUNK_NUMEL = 1 << 24


class Float32Masters(Masters):
    """The float32 values of 16-bit parameters, in the memory that the float32 model had.

    Forward and backward use the 16-bit data of a parameter. In ``float32_data`` its data is the float32 value; its
    identity, version counter, hooks and gradient accumulator stay. Afterwards the value is rounded into the 16-bit
    data. Elements that a script writes to the 16-bit data are copied to the value.
    """

    swaps = True

    def __init__(self) -> None:
        super().__init__()
        self._params: list[Tensor] = []
        self._values: list[Tensor] = []
        self._dtypes: list[torch.dtype] = []
        self._is_new = False
        self._forget_memory_of_values()

    def _forget_memory_of_values(self) -> None:
        self._listed: list[list[Tensor]] = []
        self._frozen: list[Tensor] = []
        self._index_of: dict[int, int] = {id(p): i for i, p in enumerate(self._params)}
        self._open = self._steps = 0
        self._arriving: HostCopy | None = None
        self._writes = WriteTable()
        self._writes.note(self._params)  # the first step takes elements that a script has written since
        self._groups: list[FusedGroup] = []
        self._buffers: list[tuple[FusedGroup, ModelParamBuffer]] = []
        self._loose: list[int] = list(range(len(self._params)))

    def __getstate__(self) -> dict[str, Any]:
        self._take_written()
        values = list(map(self._value, range(len(self._params))))
        names = ("retired", "own_values", "uncast", "_params", "_dtypes", "_is_new")
        return {**{name: getattr(self, name) for name in names}, "_values": values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Masters.__init__(self)
        self.__dict__.update(state)
        self._forget_memory_of_values()

    def params(self) -> list[Tensor]:
        return self._params

    def make(self, optimizer: Any, fp32_values: Mapping[int, Tensor] = MappingProxyType({})) -> bool:
        """Make values for the trainable 16-bit parameters of ``optimizer`` that have no value yet.

        The value of a parameter that has left ``param_groups`` is kept while the parameter is in a model.
        """
        lists = [group["params"] for group in optimizer.param_groups]
        listed = len(lists) == len(self._listed) and all(map(are_same, lists, self._listed))
        if self._open or (listed and not any(p.requires_grad for p in self._frozen)):
            return self._is_new
        self._take_written()
        low = [p for params in lists for p in map(params.__getitem__, low_precision_of(params))]
        known = {id(p): (v, d) for p, v, d in zip(self._params, self._values, self._dtypes, strict=True)}
        found = {id(p): p for p in low if p.requires_grad or id(p) in known}
        session = current()
        alive = {} if session is None else session.parameter_names()
        former = {id(p): p for p in self._params if p in alive}
        params = list({**former, **found}.values())
        new = [p for p in params if id(p) not in known]
        known.update((id(p), (_value_of(p, fp32_values.get(id(p))), p.dtype)) for p in new)
        values = [known[id(p)][0] for p in params]
        dtypes = [known[id(p)][1] for p in params]
        leave_private_formats([*params, *values])
        self.own_values = [*self.own_values, *new]
        self._params, self._values, self._dtypes = params, values, dtypes
        self._is_new = self._is_new or bool(new)
        buffers = self._buffers
        self._forget_memory_of_values()
        self._buffers = buffers  # those of groups that stay are used again
        self._frozen = [p for p in low if id(p) not in self._index_of]
        self._listed = list(map(list, lists))
        return self._is_new

    def find_new(self, optimizer: Any) -> bool:
        self._follow(optimizer)
        is_new, self._is_new = self._is_new, False
        return is_new

    def _follow(self, optimizer: Any) -> None:
        self.end_loop()
        self.take_assigned()
        self.make(optimizer)

    def has(self, param: Tensor) -> bool:
        return id(param) in self._index_of

    @torch.no_grad()
    def take_values(self, fp32_values: Mapping[int, Tensor]) -> None:
        for i, param in enumerate(self._params):
            if id(param) in fp32_values:
                self._value(i).copy_(fp32_values[id(param)])

    def float32(self, param: Tensor, shown: Tensor) -> Tensor | None:
        """Return a copy of the value of ``param`` that rounds to ``shown``; None without one of its shape."""
        index = self._index_of.get(id(param))
        if index is None or self._value(index).shape != shown.shape:
            return None
        return fp32_value(shown, self._value(index)).clone()

    @torch.no_grad()
    def load(self, param: Tensor, value: Tensor) -> Tensor:
        self._value(self._index_of[id(param)]).copy_(value)
        return value

    @torch.no_grad()
    def end_loading(self, loaded: Collection[Tensor], *, by_value: bool = False) -> None:
        """Note that ``loaded`` have been loaded; ``by_value``: take elements that differ from the rounded values."""
        if by_value and not self._open:
            indices = [self._index_of[id(p)] for p in loaded if id(p) in self._index_of]
            _take_differing([self._values[i] for i in indices], [self._params[i] for i in indices])
        self.keep_values_of(set(map(id, loaded)))

    @torch.no_grad()
    def round_own_values(self) -> None:
        self._take_written()
        indices = [self._index_of[id(p)] for p in self.own_values if id(p) in self._index_of]
        if indices and not self._open:
            _copy([self._values[i] for i in indices], [self._params[i] for i in indices])

    def _value(self, i: int) -> Tensor:
        return self._params[i].detach() if self._open else self._values[i]

    # What scripts write

    def begin_step(self, optimizer: Any) -> None:
        """Make values of new parameters, and take elements of 16-bit data that differ from the rounded values."""
        self._follow(optimizer)
        self._take_written()
        if self._params and not self._open and self._params[0].device.type == "npu" and not is_capturing():
            self._look_for_uncounted(optimizer)

    @torch.no_grad()
    def _look_for_uncounted(self, optimizer: Any) -> None:
        """Compare 16-bit data with the rounded values in steps 2, 8, 32, …; a later step reads the result."""
        if self._arriving is not None and (differs := self._arriving.if_come()) is not None:
            self._arriving = None
            if differs > 0:
                warn_once(optimizer, UNCOUNTED)
        self._steps += 1
        if self._steps & (self._steps - 1) or self._steps.bit_length() % 2:
            return
        # Other buffers also have elements without 16-bit data there: of float32 parameters, or of data that has left.
        whole = [
            (group, buffer)
            for group, buffer in self._buffers
            if len(buffer.params) == len(group.params) and not buffer.table.broken(buffer.params)
        ]
        pairs = [(buffer.flat, group.param_flat) for group, buffer in whole]
        compared = {id(p) for _, buffer in whole for p in buffer.params}
        single = [i for i, p in enumerate(self._params) if id(p) not in compared and p.numel()]
        pairs += [(self._params[i], self._values[i]) for i in single]
        device = self._params[0].device  # one of several is enough for a warning
        largest = [v.to(p.dtype).sub_(p).abs_().amax().float() for p, v in pairs if p.device == device]
        if largest:
            self._arriving = HostCopy(torch.stack(largest).amax())

    @torch.no_grad()
    def _take_written(self) -> None:
        params = self._params
        if self._open or not params:
            return
        self.take_assigned()
        changed = self._writes.written(params)
        for i in changed:
            self._fit(i)
        others: Sequence[int] = range(len(params))
        if extension is not None:
            others = extension.take_written_cpu(self._values, params)
        # On an NPU a comparison costs launches, so only tensors with a new version counter or address are compared.
        counted = set(changed)
        others = [i for i in others if i in counted or params[i].device.type != "npu"]
        _take_differing([self._values[i] for i in others], [params[i] for i in others])
        if changed:
            self._writes.note(params, changed)

    def take_assigned(self) -> None:
        if self._open or len(low_precision_of(self._params)) == len(self._params):
            return
        for i, param in enumerate(self._params):
            if param.dtype == torch.float32 and not self._open:
                self._values[i] = param.data
                param.data = param.data.to(self._dtypes[i])

    def _fit(self, i: int) -> None:
        """Follow a parameter that a script has moved to another device, or given another shape."""
        param, value = self._params[i], self._values[i]
        leave_private_formats([param])
        if value.shape != param.shape:
            self._values[i] = param.detach().float()
        elif value.device != param.device:
            self._values[i] = value.to(param.device)

    # Float32 data

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Give all parameters float32 data for a step. The caller rounds the values by ``end_step``."""
        if self._open or not self._params:
            self._open += 1
            try:
                yield
            finally:
                self._open -= 1
            return
        self._open = 1  # before the first parameter has float32 data: other threads call models of the session
        try:
            low = swap_data(self._params, self._values)
            self._values = []  # a fused optimizer frees memory that it moves values from, if no other tensor has it
            try:
                yield
            finally:
                # If a script gives a parameter other float32 data, that becomes its value.
                self._values = swap_data(self._params, low)
        finally:
            self._open = 0

    @contextmanager
    def float32_data(self, params: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Give ``params`` float32 data, and round it at the end. None: all parameters."""
        if self._open:
            yield
            return
        self.take_assigned()
        self._take_written()
        if params is None:
            try:
                with self.stepping():
                    yield
            finally:
                self._round(range(len(self._params)))
            return
        indices = [self._index_of[id(p)] for p in params if id(p) in self._index_of]
        chosen = [self._params[i] for i in indices]
        low = swap_data(chosen, [self._values[i] for i in indices])
        try:
            yield
        finally:
            for i, value in zip(indices, swap_data(chosen, low), strict=True):
                self._values[i] = value
            self._round(indices)

    @torch.no_grad()
    def _round(self, indices: Sequence[int], buffers: Sequence[tuple[FusedGroup, ModelParamBuffer]] = ()) -> None:
        """Round the values of parameters ``indices`` and of ``buffers`` into the 16-bit data."""
        try:
            for group, buffer in buffers:
                buffer.flat.copy_(group.param_flat)
                if buffer.kept:
                    buffer.release_kept()
            _copy(list(map(self._params.__getitem__, indices)), list(map(self._values.__getitem__, indices)))
        finally:  # also after a failed launch: the next step rounds again, and a script has written nothing
            self._writes.note(self._params, *(() if buffers else (list(indices),)))

    @labelled("amp.copy_masters")
    def end_step(self, optimizer: Any) -> None:
        """Round the values into the 16-bit data. After a skipped step they are as before, so this changes nothing."""
        if self._open or not self._params:
            return
        groups = fused_groups(optimizer)
        if groups:
            self._lay_out(groups)
            self._round(self._loose, self._buffers)
        else:
            self._round(range(len(self._params)))

    def _lay_out(self, groups: Sequence[FusedGroup]) -> None:
        """Lay the 16-bit data out like the values in the buffers of ``groups``."""
        if self.has_flat_model(groups):
            return
        held = {id(group): buffer for group, buffer in self._buffers if not buffer.table.broken(buffer.params)}
        self._buffers = []
        for group in groups:
            buffer = held.get(id(group)) or group.add_model_params(
                [p if self._may_lay_out(p) else None for p in group.params]
            )
            if buffer is not None:
                self._buffers.append((group, buffer))
        self._groups = list(groups)
        laid_out = {id(p) for _, buffer in self._buffers for p in buffer.params}
        self._loose = [i for i, p in enumerate(self._params) if id(p) not in laid_out]
        self._writes.note(self._params)

    def _may_lay_out(self, param: Tensor) -> bool:
        index = self._index_of.get(id(param))
        return index is not None and self._values[index].stride() == param.stride()

    def has_flat_model(self, groups: Sequence[FusedGroup]) -> bool:
        return are_same(groups, self._groups) and not any(b.table.broken(b.params) for _, b in self._buffers)

    def combined_model(self, groups: Sequence[FusedGroup]) -> list[Tensor]:
        """Return for each group the buffer of its 16-bit data; of a float32 group, its own buffer."""
        self._take_written()
        self._lay_out(groups)
        stepped = {id(p) for group in groups for p in group.params}
        for param in map(self._params.__getitem__, self._loose):
            if id(param) in stepped:  # not one that has left param_groups
                raise not_combinable(param)
        flats = {id(group): buffer.flat for group, buffer in self._buffers}
        return [flats.get(id(group), group.param_flat) for group in groups]


def _value_of(param: Tensor, value: Tensor | None) -> Tensor:
    if value is None or value.dtype != torch.float32:
        return param.detach().float()
    # With its own version counter: a write to the value does not count as a write to the parameter.
    return value.data if is_dense(value.size(), value.stride()) else value.detach().clone()


def _take_differing(values: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Copy to float32 ``values`` the elements of 16-bit ``params`` that differ from the rounded ones."""
    begin = 0
    while begin < len(params):
        end = begin + 1
        numel = params[begin].numel()
        device = params[begin].device
        while end < len(params) and params[end].device == device and numel + params[end].numel() <= _CHUNK_NUMEL:
            numel += params[end].numel()
            end += 1
        _take_differing_at_once(list(values[begin:end]), list(params[begin:end]))
        begin = end


def _take_differing_at_once(values: list[Tensor], params: list[Tensor]) -> None:
    rounded = list(map(torch.empty_like, params))
    torch._foreach_copy_(rounded, values)
    for value, param, low in zip(values, params, rounded, strict=True):
        torch.where(param.detach() != low, param.detach(), value, out=value)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy ``sources`` to ``targets``, device by device; torch_npu's list operators do not increment versions."""
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        listed = by_device.setdefault(target.device, ([], []))
        listed[0].append(target)
        listed[1].append(source)
    for device, (written, read) in by_device.items():
        torch._foreach_copy_(written, read)
        if device.type == "npu":
            increment_versions(written)
