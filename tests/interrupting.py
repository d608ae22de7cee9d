# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Interrupt`` raises KeyboardInterrupt where CPython would run the handler of Ctrl-C, at the n-th of these places.

They are the entries of functions, the returns from calls, and jumps backward, in the package or in some of its files.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import apex_npu

PACKAGE = str(Path(apex_npu.__file__).parent)


@functools.cache
def places(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions of ``code`` before which a handler may run: after a call, and at a jump backward."""
    jumps = dis.hasjrel + dis.hasjabs
    instructions = list(dis.get_instructions(code))
    backward = {i.offset for i in instructions if i.opcode in jumps and i.argval < i.offset}
    calls = [(a.offset, b.offset) for a, b in pairwise(instructions) if a.opname.startswith("CALL")]
    return frozenset(backward | {after for call, after in calls if _block(code, call) == _block(code, after)})


@functools.cache
def last_calls(code: CodeType) -> frozenset[int]:
    """Offsets of the calls of ``code`` after which a block ends; a handler that follows still runs inside of it."""
    instructions = pairwise(dis.get_instructions(code))
    calls = [(a.offset, b.offset) for a, b in instructions if a.opname.startswith("CALL")]
    return frozenset(call for call, after in calls if _block(code, call) != _block(code, after))


def _block(code: CodeType, offset: int) -> Any:
    """What handles an exception at ``offset``; before Python 3.11, whose code ends blocks itself, always the same."""
    parse: Any = getattr(dis, "_parse_exception_table", lambda _: [])
    return next((entry for entry in parse(code) if entry.start <= offset < entry.end), None)


class Interrupt:
    """In a ``with`` block; takes the KeyboardInterrupt that it raises itself.

    Args:
        n: At which place, counted from 1.
        files: Names of the package's files that count; none: all.

    Attributes:
        at: Where it was raised: file, function and line; None where there were less than n places.
        count: How many places there were until then.
    """

    def __init__(self, n: int, *files: str) -> None:
        self.n = n
        self.files = files
        self.at: tuple[str, str, int] | None = None
        self.count = 0
        self._concerned: dict[CodeType, bool] = {}

    def __enter__(self) -> Interrupt:
        if self.at is None:
            sys.settrace(self._on_entry)
            sys.setprofile(self._on_call)
        return self

    def __exit__(self, kind: Any, *_: Any) -> bool:
        self._stop()
        return kind is KeyboardInterrupt and self.at is not None

    @staticmethod
    def _stop() -> None:
        sys.setprofile(None)
        sys.settrace(None)

    def _concerns(self, code: CodeType) -> bool:
        path = code.co_filename
        return path.startswith(PACKAGE) and (not self.files or Path(path).name in self.files)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_return" and self._concerned.get(frame.f_code) and frame.f_lasti in last_calls(frame.f_code):
            self._pass(frame)

    def _on_entry(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in self._concerned:
            self._concerned[code] = self._concerns(code)
        if not self._concerned[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._pass(frame)
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self._pass(frame)
        return self._on_opcode

    def _pass(self, frame: FrameType) -> None:
        self.count += 1
        if self.count == self.n:
            self._stop()
            self.at = Path(frame.f_code.co_filename).name, frame.f_code.co_name, frame.f_lineno
            raise KeyboardInterrupt
