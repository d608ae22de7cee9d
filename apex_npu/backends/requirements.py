# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which releases of an optional package work."""

from __future__ import annotations

import importlib.metadata
import re


def require(needed_by: str, distribution: str, oldest: str) -> None:
    """Called before the first import of an optional package.

    Args:
        needed_by: What needs it, for the message.
        distribution: The package, as pip names it.
        oldest: The oldest release that tests have run.

    Raises:
        ImportError: The package is missing, or older.
    """
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or _release(found) < _release(oldest):
        there = "it is not installed" if found is None else f"{found} is installed"
        raise ImportError(
            f'{needed_by} needs {distribution} >= {oldest} ({there}): pip install "{distribution}>={oldest}"'
        )


def _release(version: str) -> tuple[int, ...]:
    """The numbers that ``version`` begins with; what follows (``rc1``, ``.dev0``) does not count."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [] if match is None else list(map(int, match[0].split(".")))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
