# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``store_param_remainders``: float32 values from 16-bit parameters and their remainders."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor

from apex_npu.amp.master_params import MasterParams
from apex_npu.fusion import MASTER_PARAM, EncodedView, FusedGroup, WriteTable, remainders_of
from apex_npu.ops import LOW_PRECISION


class RemainderMasters(MasterParams):
    """The masters of an optimizer that steps the model's own parameters and keeps their missing bits in its state.

    A remainder does not show whether it belongs to the parameter's current value. After a script has written to a
    parameter, and until the next step, the parameter's own value is shown.
    """

    are_new = True  # the optimizer may have got parameters since the last look

    def __init__(self) -> None:
        """Make an object that belongs to no optimizer until ``belong_to``."""
        super().__init__()
        self._optimizer: Callable[[], Any] = _gone
        self._views: dict[int, EncodedView] = {}
        self._groups: list[weakref.ref[FusedGroup]] = []
        self._indices: dict[int, int] = {}
        self._stepped: list[Tensor] = []
        self._loaded: list[Tensor] = []
        self._writes = WriteTable()

    def __reduce__(self) -> Any:
        """Copy as an empty object, which then belongs to the optimizer's copy."""
        return RemainderMasters, ()

    def belong_to(self, optimizer: Any) -> None:
        """See ``MasterParams``. The reference is weak: models keep their masters alive, maybe without the optimizer."""
        self._optimizer = weakref.ref(optimizer)
        self._remember(remainders_of(optimizer))

    def make(self, optimizer: Any, fp32_values: Mapping[int, Tensor] = MappingProxyType({})) -> bool:
        """Store the bits of ``fp32_values`` that 16-bit parameters lack in the state of ``optimizer``, a fused one."""
        optimizer.state_formats = optimizer.state_formats.with_remainders()
        self.belong_to(optimizer)
        self.take_values(fp32_values)
        self.own_values = [param for param in self._params() if id(param) in fp32_values]
        return False

    def has(self, param: Tensor) -> bool:
        """See ``MasterParams``."""
        return self._view(param) is not None or self.may_take(param)

    def may_take(self, param: Tensor) -> bool:
        """See ``MasterParams``."""
        return any(param is p for p in self._params())

    def take_values(self, fp32_values: Mapping[int, Tensor]) -> None:
        """See ``MasterParams``."""
        optimizer: Any = self._optimizer()
        taking = [param for param in self._params() if id(param) in fp32_values]
        views = {param: EncodedView.remainder_of(param, fp32_values[id(param)]) for param in taking}
        for param, view in views.items():
            optimizer.state[param][MASTER_PARAM] = view
        self._remember(views)

    def float32(self, param: Tensor, shown: Tensor) -> Tensor | None:
        """See ``MasterParams``."""
        view = self._view(param)
        if view is None or self._is_written(param, view):
            return None
        return view.dequantize().to(shown.device)

    def load(self, param: Tensor, value: Tensor) -> Tensor:
        """See ``MasterParams``."""
        view = self._view(param)
        if view is not None:
            view.copy_(value)
        else:  # the optimizer has loaded a state without masters
            self.take_values({id(param): value})
        self._loaded.append(param)
        return param.detach()  # torch would round halves to even

    def end_loading(self, loaded: Collection[Tensor], *, by_value: bool = False) -> None:
        """See ``MasterParams``."""
        ids = set(map(id, loaded))
        self.keep_values_of(ids.intersection(map(id, self._loaded)))
        self._note_params([param for param in self._loaded if id(param) in ids])
        self._loaded = [param for param in self._loaded if id(param) not in ids]

    def copy_to_model(self, groups: Sequence[FusedGroup], skipped: Tensor | None = None) -> str | None:
        """Note that a step has written parameters and remainders, so that they belong together."""
        if self._groups != (fused := list(map(weakref.ref, groups))):
            for group in groups:
                if group.own_states:
                    views: list[Any] = group.state_views(MASTER_PARAM)
                    self._remember(dict(zip(group.params, views, strict=True)))
            self._groups = fused
        self._writes.note(self._stepped)
        return None

    def take_writes(self, optimizer: Any) -> str | None:
        """See ``MasterParams``. If a parameter's version counter has changed, its remainder becomes 0."""
        for i in self._writes.counted(self._stepped):
            view = self._view(self._stepped[i])
            if view is not None and not view.is_of_param():
                view.fill_(0.0)
        return None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """See ``MasterParams``."""
        optimizer = self._optimizer()
        shown = {} if optimizer is None else remainders_of(optimizer)
        unwritten = [param for param, view in shown.items() if not self._is_written(param, view)]
        yield
        self._note_params(unwritten)

    def _params(self) -> list[Tensor]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.dtype in LOW_PRECISION]

    def _remember(self, views: Mapping[Tensor, EncodedView]) -> None:
        self._views.update((id(param), view) for param, view in views.items())
        self._note_params(list(views))

    def _view(self, param: Tensor) -> EncodedView | None:
        optimizer = self._optimizer()
        if optimizer is None:
            return self._views.get(id(param))
        shown = optimizer.state.get(param, {}).get(MASTER_PARAM)
        return shown if isinstance(shown, EncodedView) else None

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


def _gone() -> None:
    """Return None, as a reference to a deleted optimizer does."""
