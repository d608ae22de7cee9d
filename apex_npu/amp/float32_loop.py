# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loop over ``amp.master_params(optimizer)``, in which each parameter has float32 data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from apex_npu.amp.masters import Masters


class Float32Loop(Iterator[Tensor]):
    """Yields parameters, each with float32 data until the next one is requested.

    A parameter that the model itself had in 16 bits keeps its data: NVIDIA's tests compare it in the loop with float16.
    The current parameter has 16-bit data again when the script drops this object, and at the latest at the next
    forward, block, step or state dict. If these are in the loop's body, the loop goes on with the next parameter.
    """

    def __init__(self, params: Callable[[], list[Tensor]], masters: Masters) -> None:
        """Make the iterator.

        Args:
            params: Returns the parameters; called when the first one is requested.
            masters: The masters of their optimizer.
        """
        self.params = params
        self._masters = masters
        self._left: Iterator[Tensor] | None = None
        self._uncast: set[int] = set()
        # Nothing that it refers to refers to this object: it ends when the script drops this object, rather than by
        # garbage collection.
        self._current: AbstractContextManager[None] | None = None

    def __next__(self) -> Tensor:
        """Return the next parameter."""
        masters = self._masters
        if self._left is None:
            self._left = iter(self.params())
            masters.uncast = [param for param in masters.uncast if masters.has(param)]  # others need not be kept
            self._uncast = set(map(id, masters.uncast))
        self.close()
        param = next(self._left)
        if masters.has(param) and id(param) not in self._uncast:
            masters.end_loop()
            masters.loop = weakref.ref(self)
            self._current = masters.float32_data([param])
            self._current.__enter__()
        return param

    def close(self) -> None:
        """Give the current parameter 16-bit data again."""
        current, self._current = self._current, None
        if current is not None:
            current.__exit__(None, None, None)
