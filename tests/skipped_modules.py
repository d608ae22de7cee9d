# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Test modules that are not imported, since they could not be, and are reported as skipped, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


class SkippedModule(pytest.Module):
    """A placeholder for a test module that is skipped, with the reason."""

    reason = ""

    def collect(self) -> Any:
        pytest.skip(self.reason, allow_module_level=True)


def skipped_module(path: Path, parent: Any, reason: str) -> SkippedModule:
    """What ``pytest_pycollect_makemodule`` returns for ``path``."""
    module = SkippedModule.from_parent(parent, path=path)
    module.reason = reason
    return module
