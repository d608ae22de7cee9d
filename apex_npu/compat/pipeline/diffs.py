# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Unified diffs, applied in memory: what comes out, or what does not fit and why, is known before a file changes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .errors import PipelineError

_HUNK = re.compile(rb"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


@dataclass(frozen=True)
class Hunk:
    """A place that changes: whole lines with their ends, numbered from 0; ``changed`` of them are added or removed."""

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    changed: int

    def reversed(self) -> Hunk:
        """The same, backwards."""
        return Hunk(self.new_start, self.old_start, self.new, self.old, self.changed)


@dataclass(frozen=True)
class FileDiff:
    """What changes in one file, or the whole of a new one."""

    path: str
    hunks: tuple[Hunk, ...]
    is_new: bool = False
    is_deleted: bool = False

    @property
    def changed_lines(self) -> int:
        """How many lines are added or removed."""
        return sum(hunk.changed for hunk in self.hunks)

    def reversed(self) -> FileDiff:
        """The same, backwards."""
        hunks = tuple(hunk.reversed() for hunk in self.hunks)
        return replace(self, hunks=hunks, is_new=self.is_deleted, is_deleted=self.is_new)

    def apply(self, content: bytes | None) -> tuple[bytes | None, list[str]]:
        """What the file's ``content``, None where it is not there, becomes, and what does not fit.

        Returns:
            The new content, which counts only if the list is empty; and for each hunk that fails, which and why.
        """
        if self.is_new:
            if content is not None:
                return None, [f"{self.path} is to be made, and is there already"]
            return b"".join(self.hunks[0].new), []
        if content is None:
            return None, [f"{self.path} is not there"]
        lines = content.splitlines(keepends=True)
        result: list[bytes] = []
        reasons = []
        done = shift = 0
        for number, hunk in enumerate(self.hunks, 1):
            place = _find(lines, hunk.old, hunk.old_start + shift, done)
            if place is None:
                reasons.append(f"{self.path}, hunk {number} at line {hunk.old_start + 1}: {_why(lines, hunk.old)}")
                continue
            result += lines[done:place]
            result += hunk.new
            done = place + len(hunk.old)
            shift = place - hunk.old_start
        result += lines[done:]
        if self.is_deleted:
            if result and not reasons:
                reasons.append(f"{self.path} has more lines than the patch made")
            return None, reasons
        return b"".join(result), reasons


def _find(lines: list[bytes], wanted: tuple[bytes, ...], near: int, first: int) -> int | None:
    """Where ``wanted`` stands in ``lines`` from ``first`` on: as near as can be to the line ``near``."""
    places = (at for at in range(first, len(lines) - len(wanted) + 1) if tuple(lines[at : at + len(wanted)]) == wanted)
    return min(places, key=lambda at: abs(at - near), default=None)


def _why(lines: list[bytes], wanted: tuple[bytes, ...]) -> str:
    for line in wanted:
        if line not in lines:
            text = line.decode("utf-8", "replace").strip()
            if line.rstrip(b"\n") + b"\r\n" in lines:
                return f"the file's lines end with CR LF, those of the patch with LF ({text!r})"
            return f"it changes what stands at {text!r}, and there is no such line"
    return "its lines are there, but not one after the other"


def parse(patch: bytes) -> tuple[FileDiff, ...]:
    """The files of a diff as git writes it.

    Raises:
        PipelineError: It does more than change and add files of text.
    """
    files = []
    for part in re.split(rb"^diff --git .*\n", patch, flags=re.MULTILINE)[1:]:
        head, *hunks = re.split(rb"^(?=@@ )", part, flags=re.MULTILINE)
        new = re.search(rb"^\+\+\+ b/(.+)$", head, flags=re.MULTILINE)
        if new is None or b"\nrename " in head or not hunks:
            raise PipelineError("a patch may change and add files of text, nothing else")
        files.append(FileDiff(new[1].decode(), tuple(map(_parse_hunk, hunks)), is_new=b"--- /dev/null" in head))
    return tuple(files)


def _parse_hunk(text: bytes) -> Hunk:
    header, *lines = text.splitlines(keepends=True)
    numbers = _HUNK.match(header)
    if numbers is None:
        raise PipelineError(f"this is no header of a hunk: {header!r}")
    old: list[bytes] = []
    new: list[bytes] = []
    sides: list[list[bytes]] = []
    for line in lines:
        if line.startswith(b"\\"):  # "No newline at end of file", of the line before
            for side in sides:
                side[-1] = side[-1].removesuffix(b"\n")
            continue
        sides = {b" ": [old, new], b"-": [old], b"+": [new]}[line[:1]]
        for side in sides:
            side.append(line[1:])
    changed = sum(line[:1] in (b"+", b"-") for line in lines)
    return Hunk(max(int(numbers[1]) - 1, 0), max(int(numbers[2]) - 1, 0), tuple(old), tuple(new), changed)
