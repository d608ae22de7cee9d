# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Notebooks. Their code cells are rewritten as one program. All other bytes of the JSON text stay the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from apex_npu.migrate.engine.source import Edit, Source, UnreadableError, apply_edits
from apex_npu.migrate.rewriting import Rewritten

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|.", re.DOTALL)
_SHELL = re.compile(r"[ \t]*[%!?]|.*\?[ \t]*$")
_PYTHON_CELLS = re.compile(r"%%(time|timeit|capture|prun)\b")


@dataclass(frozen=True)
class _Piece:
    """A string of a code cell's source, its offset in the program, and that of its first character in the file."""

    text: str
    start: int
    cell: int
    place: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def _cells(text: str) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Yield the number of each code cell, from 1, and the strings of its source with their places in the file."""
    literals = [*_STRING.finditer(text)]
    numbers = map(str, range(len(literals)))

    def string(number: str) -> str:
        return str(json.loads(literals[int(number)][0]))

    numbered = _STRING.sub(lambda _: json.dumps(next(numbers)), text)  # each string is its number in ``literals``
    notebook = json.loads(numbered, object_pairs_hook=lambda pairs: {string(name): value for name, value in pairs})
    for number, cell in enumerate(notebook["cells"], 1):
        source = cell.get("source", [])
        if string(cell["cell_type"]) == "code":
            given = source if isinstance(source, list) else [source]
            pieces = [(string(one), literals[int(one)].start() + 1) for one in given]
            first = pieces[0][0] if pieces else ""
            if not first.startswith("%%") or _PYTHON_CELLS.match(first):
                yield number, pieces


def _python(cell: str) -> str:
    """Return ``cell`` with spaces in place of notebook and shell commands."""
    lines, goes_on = [], False
    for line in cell.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        goes_on = (goes_on or bool(_SHELL.match(body))) and bool(body)
        lines.append(" " * len(body) + line[len(body) :] if goes_on else line)
        goes_on = goes_on and body.endswith("\\")
    return "".join(lines)


def rewrite_notebook(data: bytes, path: str, rewrite: Callable[[str], Rewritten]) -> Rewritten:
    """Apply ``rewrite`` to the program of a notebook. The findings have the places in the notebook's file.

    Raises:
        UnreadableError: The file is not a notebook.
    """
    try:
        text = data.decode("utf-8")
        cells = list(_cells(text))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UnreadableError("F901", f"the file is not a notebook ({type(error).__name__}: {error})") from None
    pieces: list[_Piece] = []
    program = ""
    for number, texts in cells:
        at = len(program)
        for one, place in texts:
            pieces.append(_Piece(one, at, number, place))
            at += len(one)
        program += _python("".join(one for one, _ in texts)) + "\n"
    rewritten = rewrite(program)
    file, source = Source(text), Source(program)
    edits: list[Edit] = []
    findings = []
    for finding in rewritten.findings:
        start = source.line_start(finding.line) + finding.column - 1
        end = source.line_start(finding.end_line) + finding.end_column - 1
        # A text inserted between two pieces belongs to the piece whose line it continues.
        around = [piece for piece in pieces if piece.start <= start and end <= piece.end and piece.text]
        if not around:
            raise UnreadableError("F901", f"line {finding.line} of its program is in several strings")
        piece = around[0 if (finding.after or "").startswith("\n") else -1]
        begin, stop = (_in_file(text, piece.place, at - piece.start) for at in (start, end))
        if finding.status == "changed":
            edits.append(Edit(begin, stop, json.dumps(finding.after, ensure_ascii=False)[1:-1]))
        (line, column), (end_line, end_column) = file.place(begin), file.place(stop)
        places: dict[str, Any] = {"line": line, "column": column, "end_line": end_line, "end_column": end_column}
        message = f"cell {piece.cell}" + (f": {finding.message}" if finding.message else "")
        findings.append(replace(finding, path=path, message=message, **places))
    return Rewritten(apply_edits(text, edits).encode("utf-8") if edits else data, tuple(findings))


def _in_file(text: str, place: int, offset: int) -> int:
    """Return the offset in the JSON text of character number ``offset`` of the string whose first is at ``place``."""
    for _ in range(offset):
        place = _ESCAPE.match(text, place).end()  # type: ignore[union-attr]
    return place
