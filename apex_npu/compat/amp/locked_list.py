# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``LockedList``: a list of Apex's that scripts may read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class LockedList(list[Any]):
    """A list that refuses edits, which would be lost; the error is ``advice``.

    It is a list because torch's ``_foreach`` functions and old scripts require one. An element that is already in its
    place can be assigned, since scripts that exchange a parameter first do so in ``param_groups``.
    """

    def __init__(self, items: Iterable[Any], advice: str) -> None:
        super().__init__(items)
        self.advice = advice

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice) or self[index] is not value:
            self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(self.advice)

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> Any:
        return list, (list(self),)
