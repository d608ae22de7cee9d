# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which releases of a framework its integration works with."""

from __future__ import annotations

import importlib.metadata
import re


def require(integration: str, distribution: str, oldest: str) -> None:
    """Called by an integration before it imports its framework.

    Args:
        integration: Its name: that of the module, and of the extra in pyproject.toml.
        distribution: The framework, as pip names it.
        oldest: The oldest release that tests have run.

    Raises:
        ImportError: The framework is missing, or older.
    """
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or _release(found) < _release(oldest):
        there = "it is not installed" if found is None else f"{found} is installed"
        raise ImportError(
            f"apex_npu.integrations.{integration} needs {distribution} >= {oldest} ({there}): "
            f'pip install "apex-npu[{integration}]"'
        )


def _release(version: str) -> tuple[int, ...]:
    """The numbers that ``version`` begins with; what follows (``rc1``, ``.dev0``) does not count."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [] if match is None else list(map(int, match[0].split(".")))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
