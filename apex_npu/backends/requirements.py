# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The releases of optional packages."""

from __future__ import annotations

import importlib.metadata
import re


def require(needed_by: str, distribution: str, oldest: str) -> None:
    """Check an optional package before its first import.

    Args:
        needed_by: The name of the feature that needs the package, for the message.
        distribution: The name of the package for pip.
        oldest: The oldest release that is tested.

    Raises:
        ImportError: The package is missing or older.
    """
    found = installed(distribution)
    if found is None or release(found) < release(oldest):
        there = "it is not installed" if found is None else f"{found} is installed"
        raise ImportError(
            f'{needed_by} needs {distribution} >= {oldest} ({there}): pip install "{distribution}>={oldest}"'
        )


def installed(distribution: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of ``version``; a suffix (``rc1``, ``.dev0``) is ignored."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [] if match is None else list(map(int, match[0].split(".")))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
