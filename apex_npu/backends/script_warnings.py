# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Warnings that point at the script's line, through any number of wrappers."""

from __future__ import annotations

import inspect
import warnings
from types import FrameType

# contextlib is the caller in a with statement.
_LIBRARIES = {"apex", "apex_npu", "contextlib", "torch", "torch_npu"}


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the innermost line that is outside of this package and of torch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None and _is_of_library(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _is_of_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES
