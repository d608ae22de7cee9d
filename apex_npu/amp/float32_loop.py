# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loop over ``amp.master_params(optimizer)``, in which each parameter has float32 data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from apex_npu.amp.masters import Masters


class Float32Loop(Iterator[Tensor]):
    """Yields parameters, each with float32 data until the next one is requested.

    A parameter that the model itself had in 16 bits keeps its data: NVIDIA's tests compare it in the loop with float16.
    If a script leaves the loop early, the loop ends when the script drops this object, and at the latest at the next
    forward, block, step or state dict.
    """

    def __init__(self, params: Callable[[], list[Tensor]], masters: Masters) -> None:
        """Make the iterator.

        Args:
            params: Returns the parameters; called when the first one is requested.
            masters: The masters of their optimizer.
        """
        self.params = params
        self._masters = masters
        self._steps: Iterator[Tensor] | None = None

    def __next__(self) -> Tensor:
        """Return the next parameter."""
        if self._steps is None:
            params, masters = self.params(), self._masters
            if masters.params():
                masters.end_loop()
                masters.loop = weakref.ref(self)
            self._steps = _with_float32_data(params, masters)
        return next(self._steps)

    def close(self) -> None:
        """End the loop, and give the last parameter 16-bit data again."""
        steps: Any = self._steps
        if steps is not None:
            steps.close()


# Not a method: its frame would refer to the loop, and only garbage collection would end a loop that is left early.
def _with_float32_data(params: list[Tensor], masters: Masters) -> Iterator[Tensor]:
    masters.uncast = [param for param in masters.uncast if masters.has(param)]  # others need not be kept
    uncast = set(map(id, masters.uncast))
    for param in params:
        if masters.has(param) and id(param) not in uncast:
            with masters.float32_data([param]):
                yield param
        else:
            yield param
