# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loop over ``amp.master_params(optimizer)``, in which each parameter has float32 data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


class Float32Loop(Iterator[Tensor]):
    """Yields parameters, each with float32 data until the next one is requested.

    A parameter that the model itself had in 16 bits keeps its data: NVIDIA's tests compare it in the loop with float16.
    If a script leaves the loop early, the next forward, block, step or state dict ends it.
    """

    def __init__(self, params: Callable[[], list[Tensor]], masters: Any) -> None:
        """Make the iterator.

        Args:
            params: Returns the parameters; called when the first one is requested.
            masters: The ``Masters`` of their optimizer, or None.
        """
        self.params = params
        self._masters = masters
        self._steps: Iterator[Tensor] | None = None

    def __next__(self) -> Tensor:
        """Return the next parameter."""
        if self._steps is None:
            self._steps = self._loop()
        return next(self._steps)

    def _loop(self) -> Iterator[Tensor]:
        params, masters = self.params(), self._masters
        if masters is None:
            yield from params
            return
        masters.end_loop()
        masters.loop = weakref.ref(self)
        masters.uncast = [param for param in masters.uncast if masters.has(param)]  # others need not be kept
        uncast = set(map(id, masters.uncast))
        for param in params:
            if masters.has(param) and id(param) not in uncast:
                with masters.float32_data([param]):
                    yield param
            else:
                yield param

    def close(self) -> None:
        """End the loop, and give the last parameter 16-bit data again."""
        steps: Any = self._steps
        if steps is not None:
            steps.close()
