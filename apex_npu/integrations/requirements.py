# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which releases of a framework its integration works with."""

from __future__ import annotations

from apex_npu.backends import requirements


def require(integration: str, distribution: str, oldest: str) -> None:
    """Called by an integration before it imports its framework.

    Args:
        integration: Its name: that of the module, and of the extra in pyproject.toml.
        distribution: The framework, as pip names it.
        oldest: The oldest release that tests have run.

    Raises:
        ImportError: The framework is missing, or older.
    """
    requirements.require(f"apex_npu.integrations.{integration}", distribution, oldest)
