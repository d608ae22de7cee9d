# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``store_param_remainders``: float32 values from 16-bit parameters and their remainders."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from apex_npu.amp.masters import Masters
from apex_npu.fusion import (
    MASTER_PARAM,
    EncodedView,
    FusedGroup,
    WriteTable,
    low_precision_of,
    remainders_of,
    swap_data,
)
from apex_npu.ops import LOW_PRECISION


class RemainderMasters(Masters):
    """The masters of an optimizer that steps the model's own parameters and keeps their missing bits in its state.

    A remainder does not show whether it belongs to the parameter's current value. If a script writes to a parameter,
    its remainder is ignored until the next step.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """Make an object that belongs to no optimizer until ``belong_to``; ``make`` gives remainders this ``dtype``."""
        super().__init__()
        self._dtype = dtype
        self._optimizer: Callable[[], Any] = lambda: None  # or a weak reference
        self._views: dict[int, EncodedView] = {}
        # Remainders of parameters that the optimizer has not stepped. They are not in its state, because
        # torch.distributed.checkpoint regards an optimizer with any state as initialized.
        self._unstepped: dict[Tensor, EncodedView] = {}
        self._copied: dict[Tensor, Tensor] = {}
        self._groups: list[weakref.ref[FusedGroup]] = []
        self._indices: dict[int, int] = {}
        self._stepped: list[Tensor] = []
        self._loaded: list[Tensor] = []
        self._entries = 0  # of the optimizer's state, after a step
        self._writes = WriteTable()
        # The parameters that have float32 data, each with its 16-bit data.
        self._open: dict[int, tuple[Tensor, Tensor]] = {}

    def __reduce__(self) -> Any:
        """Copy only the values that are not in the optimizer's state, which is copied with the optimizer."""
        # Each is copied as its float32 value.
        return RemainderMasters, (), {"_copied": dict(self._unstepped), "uncast": self.uncast}

    def belong_to(self, optimizer: Any) -> None:
        """Attach to ``optimizer``. The reference is weak, because models keep masters alive without the optimizer.

        A shallow copy of an optimizer has the masters of the original.
        """
        if self._optimizer() is not None:
            return
        self._optimizer = weakref.ref(optimizer)
        copied, self._copied = self._copied, {}
        self.take_values({id(param): value for param, value in copied.items()})
        self._remember(self._shown())

    def make(self, optimizer: Any, fp32_values: Mapping[int, Tensor] = MappingProxyType({})) -> bool:
        """Store the bits of ``fp32_values`` that 16-bit parameters lack in the state of ``optimizer``, a fused one."""
        if self._optimizer() is optimizer:
            return True
        optimizer.state_formats = optimizer.state_formats.with_remainders(self._dtype)
        self.belong_to(optimizer)
        self.take_values(fp32_values)
        return False

    def without_values(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Remove masters, and the count of random bits unless states are encoded with random bits."""
        optimizer = self._optimizer()
        counts = optimizer.state_formats.draws_random_bits
        left_out = {MASTER_PARAM} if counts else {MASTER_PARAM, "applied_steps"}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        unstepped = {i for i, param in enumerate(params) if optimizer.state.get(param, {}).keys() == {MASTER_PARAM}}
        state = state_dict["state"].items()
        kept = {
            key: {name: value for name, value in entry.items() if name not in left_out}
            for key, entry in state
            if key not in unstepped
        }
        return {**state_dict, "state": {key: entry for key, entry in kept.items() if entry}}

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Keep the float32 value of a parameter for which the loaded state has no master."""
        self.take_assigned()
        with self.stepping():
            shown = self._shown()
            unwritten = {param: view for param, view in shown.items() if not self._is_written(param, view)}
            yield
            found = self._refresh()
            self.take_values({id(param): view.dequantize() for param, view in unwritten.items() if param not in found})

    @contextmanager
    def float32_data(self, params: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Give ``params`` float32 data, and store it at the end. None: all parameters."""
        known = self.params()
        ids = set(map(id, known if params is None else params)).difference(self._open)
        chosen = [p for p in known if id(p) in ids]
        self._show_float32(chosen)
        try:
            yield
        finally:
            self._hide_float32(chosen)

    def stepping(self) -> AbstractContextManager[None]:
        """Give parameters 16-bit data, which the optimizer steps, even inside ``float32_data``."""
        optimizer: Any = self._optimizer()
        if len(optimizer.state) != self._entries or not any(optimizer.state.values()):
            self._keep_removed(optimizer)
        for param, view in self._unstepped.items():
            optimizer.state[param][MASTER_PARAM] = view
        self._unstepped.clear()
        return self._with_16_bits() if self._open else nullcontext()

    @contextmanager
    def _with_16_bits(self) -> Iterator[None]:
        shown = [param for param, _ in self._open.values()]
        self._hide_float32(shown)
        try:
            yield
        finally:
            self._note_params(shown)  # which the optimizer has written, with their remainders
            self._show_float32(shown)

    def _show_float32(self, params: list[Tensor]) -> None:
        if params:
            low = swap_data(params, [_float32_of(p, self.float32(p, p)) for p in params])
            self._open.update((id(p), (p, data)) for p, data in zip(params, low, strict=True))

    def _hide_float32(self, params: list[Tensor]) -> None:
        if params:
            low = [self._open.pop(id(p))[1] for p in params]
            for param, value in zip(params, swap_data(params, low), strict=True):
                before = _float32_of(param, self.float32(param, param))
                if not torch.equal(value, before):
                    self.load(param, value)
            self.end_loading(params)

    def find_new(self, optimizer: Any) -> bool:
        """End a loop over ``amp.master_params`` and take assigned data, before a block or a step."""
        if self.loop is not None:
            self.end_loop()
        if len(low_precision_of(self._stepped)) < len(self._stepped):
            self.take_assigned()
        return False

    def take_assigned(self) -> None:
        for index in set(range(len(self._stepped))).difference(low_precision_of(self._stepped)):
            param = self._stepped[index]
            view = self._view(param)
            if view is not None and id(param) not in self._open:
                value = param.data
                param.data = value.to(view.dtype)
                self.load(param, value)
                self.end_loading([param])

    def has(self, param: Tensor) -> bool:
        """Return whether ``param`` has a remainder or is a 16-bit parameter of the optimizer."""
        return self._view(param) is not None or any(param is p for p in self.params())

    def take_values(self, fp32_values: Mapping[int, Tensor]) -> None:
        taking = [param for param in self.params() if id(param) in fp32_values]
        if not taking:
            return
        dtype = self._optimizer().state_formats.dtypes[MASTER_PARAM]
        views = {param: EncodedView.remainder_of(param, fp32_values[id(param)], dtype) for param in taking}
        self._unstepped.update(views)
        self._remember(views)
        self.own_values = [*self.own_values, *taking]

    def float32(self, param: Tensor, shown: Tensor) -> Tensor | None:
        """Return the value of ``param``; None without a remainder, or if a script has written to ``param`` since."""
        view = self._view(param)
        if view is None or self._is_written(param, view):
            return None
        return view.dequantize().to(shown.device)

    def sent(self, param: Tensor) -> Tensor | None:
        """Return the value of a parameter after its broadcast, which has changed only the version counter."""
        view = self._view(param)
        return None if view is None else view.dequantize()

    def load(self, param: Tensor, value: Tensor) -> Tensor:
        """Write ``value`` to ``param`` and its remainder, and return the 16-bit data."""
        if id(param) in self._open:
            return value
        view = self._view(param)
        if view is not None:
            view.copy_(value)
        else:  # the optimizer has loaded a state without masters
            self.take_values({id(param): value})
        self._loaded.append(param)
        return param.detach()  # torch would round halves to even

    def end_loading(self, loaded: Collection[Tensor], *, by_value: bool = False) -> None:
        """Note that parameters and remainders of ``loaded`` belong together."""
        ids = set(map(id, loaded))
        self.keep_values_of(ids.intersection(map(id, self._loaded)))
        self._note_params([param for param in self._loaded if id(param) in ids])
        self._loaded = [param for param in self._loaded if id(param) not in ids]

    def end_step(self, optimizer: Any) -> None:
        """Note that parameters and remainders belong together, since the step has written both."""
        groups: list[FusedGroup] = optimizer.fused_groups()
        if self._groups != (fused := list(map(weakref.ref, groups))):
            for group in groups:
                if group.own_states:
                    views: list[Any] = group.state_views(MASTER_PARAM)
                    self._remember(dict(zip(group.owners, views, strict=True)))
            self._groups = fused
        self._entries = len(optimizer.state)
        self._writes.note(self._stepped)

    def begin_step(self, optimizer: Any) -> None:
        """Zero the remainders of parameters whose version counter has changed."""
        self.find_new(optimizer)
        for i in self._writes.counted(self._stepped):
            param = self._stepped[i]
            view = self._view(param)
            if view is not None and id(param) not in self._open and not view.is_of_param():
                view.fill_(0.0)

    def round_own_values(self) -> None:
        """Zero the remainders of ``own_values``."""
        for param in self.own_values:
            view = self._view(param)
            if view is not None:
                view.fill_(0.0)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Keep the remainders of parameters that move to other addresses."""
        unwritten = [param for param, view in self._shown().items() if not self._is_written(param, view)]
        yield
        self._refresh()
        self._note_params(unwritten)

    def params(self) -> list[Tensor]:
        """Return the optimizer's 16-bit parameters, and those with a remainder and float32 data, as in a shutdown."""
        optimizer = self._optimizer()
        listed = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in listed if p.dtype in LOW_PRECISION or self._view(p) is not None]

    def _remember(self, views: Mapping[Tensor, EncodedView]) -> None:
        self._views.update((id(param), view) for param, view in views.items())
        self._note_params(list(views))

    def _view(self, param: Tensor) -> EncodedView | None:
        optimizer = self._optimizer()
        if optimizer is None:
            return self._views.get(id(param))
        shown = self._unstepped.get(param)
        if shown is None:
            shown = optimizer.state.get(param, {}).get(MASTER_PARAM)
        return shown if isinstance(shown, EncodedView) else self._removed(param)

    def _shown(self) -> dict[Tensor, EncodedView]:
        optimizer = self._optimizer()
        if optimizer is None:
            return {}
        self._keep_removed(optimizer)
        return {**remainders_of(optimizer), **self._unstepped}

    def _removed(self, param: Tensor) -> EncodedView | None:
        """Return the remainder of a parameter whose entry in the optimizer's state a script has removed."""
        view = self._views.get(id(param))
        return view if view is not None and (view.shape, view.dtype) == (param.shape, param.dtype) else None

    def _keep_removed(self, optimizer: Any) -> None:
        """Keep remainders of entries that a script has removed, as those that no step has written yet."""
        for param in self.params():
            if MASTER_PARAM not in optimizer.state.get(param, {}) and (view := self._removed(param)) is not None:
                self._unstepped.setdefault(param, view)

    def _refresh(self) -> Mapping[Tensor, EncodedView]:
        """Note and return the remainders in the optimizer's state."""
        found = remainders_of(self._optimizer())
        self._views.update((id(param), view) for param, view in found.items())
        return found

    def _is_written(self, param: Tensor, view: EncodedView) -> bool:
        return not view.is_of_param() and self._index(param) in self._writes.written(self._stepped)

    def _note_params(self, params: Sequence[Tensor]) -> None:
        indices = sorted(map(self._index, params))
        self._writes.note(self._stepped, indices)

    def _index(self, param: Tensor) -> int:
        if id(param) not in self._indices:
            self._indices[id(param)] = len(self._stepped)
            self._stepped.append(param)
        return self._indices[id(param)]


def _float32_of(param: Tensor, value: Tensor | None) -> Tensor:
    return param.detach().float() if value is None else value
