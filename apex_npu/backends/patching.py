# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Attributes that are patched for a time, and ``Undo``, which takes all changes back, after an interrupt, too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

_ABSENT = object()


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


class Patch(NamedTuple):
    """``make(owner.name)`` takes the place of ``owner.name``.

    Attributes:
        owner: A module, a class, or an object.
        name: The attribute, which must exist.
        make: Gets the attribute's value and returns the replacement.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]


def patch_attribute(undo: Undo, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put a ``Patch`` in place until ``undo`` is closed.

    Args:
        undo: Takes the callback that puts the attribute back, or deletes it where ``owner`` only inherited it.
        owner: See ``Patch``.
        name: See ``Patch``.
        make: See ``Patch``.
    """
    own = vars(owner).get(name, _ABSENT)
    kind = type(inspect.getattr_static(owner, name)) if isinstance(owner, type) else None
    if kind in (staticmethod, classmethod):
        original = inspect.getattr_static(owner, name).__func__
        replacement = kind(functools.wraps(original)(make(original)))
    else:
        original = getattr(owner, name)
        replacement = functools.wraps(original)(make(original))
    undo.callback(_put_back, owner, name, own)  # first: what is interrupted after the change is undone, too
    setattr(owner, name, replacement)


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is not _ABSENT:
        setattr(owner, name, own)
    elif name in vars(owner):
        delattr(owner, name)
