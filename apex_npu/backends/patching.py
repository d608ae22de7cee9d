# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Temporary patches of attributes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_ABSENT = object()


def patch_attribute(undo: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
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
    setattr(owner, name, replacement)
    if own is _ABSENT:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, own)
