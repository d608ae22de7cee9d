# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks the release of a framework for its integration."""

from __future__ import annotations

from apex_npu.backends import requirements


def require(integration: str, distribution: str, oldest: str) -> None:
    """Require a release of a framework. An integration calls this before it imports its framework.

    Args:
        integration: The name of the integration's module, and of the extra in pyproject.toml.
        distribution: The name of the framework for pip.
        oldest: The oldest release that is tested.

    Raises:
        ImportError: The framework is missing, or older.
    """
    requirements.require(f"apex_npu.integrations.{integration}", distribution, oldest)
