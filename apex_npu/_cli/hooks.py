# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What packages above amp and optimizers do when these call for it: ``apex_npu`` registers it, by its name.

Nothing here imports torch. What a hook does is imported when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HOOKS: dict[str, Callable[..., Any]] = {}


def register(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``call`` find ``hook`` by its name."""
    _HOOKS[hook.__name__] = hook
    return hook


def call(name: str, *args: Any) -> Any:
    """Call the hook of that name."""
    return _HOOKS[name](*args)
