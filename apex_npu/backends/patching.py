# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Temporary patches of attributes, and ``Undo``, which undoes all changes, also after an interrupt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

_ABSENT = object()


class Undo:
    """Calls that undo changes. Each is registered before its change, and may be made more than once.

    An ``ExitStack`` removes a callback before it calls it, so that an interrupt between the two would leave the change.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []

    def callback(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Have ``close`` call ``call(*arguments)``, before the calls that are registered already."""
        self._calls.append(partial(call, *arguments))

    def close(self) -> None:
        """Undo everything, the last change first. After an interrupt, the next call undoes the rest.

        Raises:
            Exception: The first exception of a call, raised after all calls were made.
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
    """The replacement of ``owner.name`` by ``make(owner.name)``.

    Attributes:
        owner: A module, a class, or an object.
        name: The attribute, which must exist.
        make: A function that takes the attribute's value and returns the replacement.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]


def patch_attribute(undo: Undo, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute until ``undo`` is closed.

    Args:
        undo: It restores the attribute, or deletes it if ``owner`` only inherited it.
        owner: A module, a class, or an object.
        name: The attribute, which must exist.
        make: A function that takes the attribute's value and returns the replacement.
    """
    own = vars(owner).get(name, _ABSENT)
    kind = type(inspect.getattr_static(owner, name)) if isinstance(owner, type) else None
    if kind in (staticmethod, classmethod):
        original = inspect.getattr_static(owner, name).__func__
        replacement = kind(functools.wraps(original)(make(original)))
    else:
        original = getattr(owner, name)
        replacement = functools.wraps(original)(make(original))
    undo.callback(_put_back, owner, name, own)  # before the change, so that an interrupt after it is undone, too
    setattr(owner, name, replacement)


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is not _ABSENT:
        setattr(owner, name, own)
    elif name in vars(owner):
        delattr(owner, name)
