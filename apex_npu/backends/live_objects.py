# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The objects of a class that exist in this process, for classes of torch that do not list their objects."""

from __future__ import annotations

import gc
from typing import TypeVar

_T = TypeVar("_T")


def instances_of(cls: type[_T]) -> list[_T]:
    """Return the instances of ``cls`` that the garbage collector tracks. This visits all objects of the process."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, cls)}
    return [found for found in objects if type(found) in kinds] if kinds else []
