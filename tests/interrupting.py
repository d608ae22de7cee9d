# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Interrupt`` raises KeyboardInterrupt in the n-th call of a function of the package, or of some of its files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import apex_npu

PACKAGE = str(Path(apex_npu.__file__).parent)


class Interrupt:
    """In a ``with`` block; takes the KeyboardInterrupt that it raises itself.

    Args:
        n: In which call, counted from 1.
        files: Names of the package's files that count; none: all.

    Attributes:
        at: Where it was raised: file, function and line; None where there were less than n calls.
        count: How many calls there were until then.
    """

    def __init__(self, n: int, *files: str) -> None:
        self.n = n
        self.files = files
        self.at: tuple[str, str, int] | None = None
        self.count = 0

    def __enter__(self) -> Interrupt:
        if self.at is None:
            sys.settrace(self._on_call)
        return self

    def __exit__(self, kind: Any, *_: Any) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt and self.at is not None

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE) and (not self.files or Path(path).name in self.files):
            self.count += 1
            if self.count == self.n:
                sys.settrace(None)
                self.at = Path(path).name, frame.f_code.co_name, frame.f_lineno
                raise KeyboardInterrupt
