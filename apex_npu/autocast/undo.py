# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Undo``: how changes are taken back, all of them, even where an interrupt comes in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Undo:
    """Calls that take changes back. Each is registered before its change, and may be made more than once.

    An ``ExitStack`` drops a callback before it calls it; an interrupt at that place would leave the change for good.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []

    def callback(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Have ``close`` call ``call(*arguments)``, before what has been registered so far."""
        self._calls.append(partial(call, *arguments))

    def close(self) -> None:
        """Take everything back, last change first. After an interrupt the next call does what remains.

        Raises:
            Exception: The first of what the calls have raised, when all have been made.
        """
        first: Exception | None = None
        while self._calls:
            try:
                self._calls[-1]()
            except Exception as error:
                first = first or error
            del self._calls[-1]
        if first is not None:
            raise first
