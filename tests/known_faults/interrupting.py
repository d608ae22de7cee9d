# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Interrupt`` raises KeyboardInterrupt where CPython would run the handler of Ctrl-C, at the n-th of these places.

They are the entries of functions, the returns from functions in C, and jumps backward, in the files of this package
that a test names.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import apex_npu

PACKAGE = str(Path(apex_npu.__file__).parent)


@functools.cache
def backward_jumps(code: CodeType) -> frozenset[int]:
    return frozenset(
        i.offset for i in dis.get_instructions(code) if i.opcode in dis.hasjrel + dis.hasjabs and i.argval < i.offset
    )


class Interrupt:
    """In a ``with`` block; takes the KeyboardInterrupt that it raises itself.

    Args:
        n: At which place, counted from 1.
        files: Names of the package's files that count.

    Attributes:
        at: Where it was raised: file, function and line; None where there were less than n places.
    """

    def __init__(self, n: int, *files: str) -> None:
        self.n = n
        self.files = files
        self.at: tuple[str, str, int] | None = None
        self._count = 0

    def __enter__(self) -> Interrupt:
        sys.settrace(self._on_entry)
        sys.setprofile(self._on_call)
        return self

    def __exit__(self, kind: Any, *_: Any) -> bool:
        sys.setprofile(None)
        sys.settrace(None)
        return kind is KeyboardInterrupt and self.at is not None

    def _concerns(self, frame: FrameType) -> bool:
        path = frame.f_code.co_filename
        return path.startswith(PACKAGE) and Path(path).name in self.files

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and self._concerns(frame):
            self._pass(frame)

    def _on_entry(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not self._concerns(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "opcode" and frame.f_lasti in backward_jumps(frame.f_code):
            self._pass(frame)
        return self._on_opcode

    def _pass(self, frame: FrameType) -> None:
        self._count += 1
        if self._count == self.n:
            sys.setprofile(None)
            sys.settrace(None)
            self.at = Path(frame.f_code.co_filename).name, frame.f_code.co_name, frame.f_lineno
            raise KeyboardInterrupt
