# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``ShownState``: what an optimizer's ``state`` was when last seen, to notice what a user has replaced in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from apex_npu.fusion import are_same, hold_values


class ShownState:
    """The dicts in a ``state``, and the views of buffers that have been put into them."""

    def __init__(self) -> None:
        """Of an empty one."""
        self._entries: list[dict[str, Any]] = []
        # Columns (dict, name, view), since all are compared on every step, in one call.
        self._views: tuple[list[dict[str, Any]], list[str], list[Tensor]] = ([], [], [])

    def remember(
        self, state: Mapping[Any, dict[str, Any]], shown: Iterable[tuple[dict[str, Any], str, Tensor]]
    ) -> None:
        """``state`` as it is now; ``shown``: dict, name and view of each that is in it."""
        self._entries = list(state.values())
        rows = list(shown)
        self._views = ([entry for entry, _, _ in rows], [name for _, name, _ in rows], [view for _, _, view in rows])

    def is_in(self, state: Mapping[Any, dict[str, Any]]) -> bool:
        """True while ``state`` consists of the very dicts and views that were there when last seen."""
        return are_same(list(state.values()), self._entries) and hold_values(*self._views)
