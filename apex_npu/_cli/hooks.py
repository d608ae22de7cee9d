# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Calls from amp and optimizers to the packages above them.

amp and optimizers may not import those packages (see the contracts in pyproject.toml). Each function imports its
package when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .options import of_environment


def amp_imported() -> None:
    """Add Apex's other names to ``apex_npu.amp``, and start the diagnostics that environment variables select.

    ``apex_npu.amp`` calls this when it is imported.
    """
    import_module("apex_npu.compat.amp")
    if asked := of_environment():
        import_module("apex_npu.debug.script").look(asked)


def debug() -> Any:
    """Return the package ``amp.debug``."""
    return import_module("apex_npu.debug")


def group_steps() -> Any:
    """Return the module that follows the ``_group_step`` of a subclass of an optimizer."""
    return import_module("apex_npu.compat.group_steps")


def step_skipped(*args: Any) -> None:
    """Report the gradients that caused a step to be skipped."""
    import_module("apex_npu.debug.gradients").explain_skip(*args)


def profiler_changed() -> None:
    """Open or close the ranges of amp for a profiler."""
    import_module("apex_npu.debug.profiling.labels").follow_profiler()
