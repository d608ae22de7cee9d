# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A stand-in for the package of this name: a writer that writes nothing."""

from typing import Any


class SummaryWriter:
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: None
