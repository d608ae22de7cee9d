# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Notebooks. Their code cells are rewritten as one program. All other bytes of the JSON text stay the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from apex_npu.migrate.engine.source import Edit, Source, UnreadableError, apply_edits, parse
from apex_npu.migrate.rewriting import Rewritten

_ESCAPE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|.", re.DOTALL)
# A command for IPython or the shell, at the start of a logical line or after ``name =``, which is the group.
_COMMAND = re.compile(r"([ \t]*(?:[^\W\d][\w., \t]*(?:\[[^\]\n]*\])?[ \t]*=[ \t]*)?)[%!?](?:.*\\\r?\n)*.*")
# Strings, comments, and a backslash with what it escapes are one token each.
_TOKEN = re.compile(
    r"""(\"{3}|'{3})(?:\\.|(?!\1).)*(?:\1|\Z) | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | \#[^\n]*
    | \\(?:\r\n|.) | .""",
    re.DOTALL | re.VERBOSE,
)
_VISIBLE = re.compile(r"\S")
_DEPTHS = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)
_PYTHON_CELLS = re.compile(r"%%(time|timeit|capture|prun)\b")


class _Text(str):
    """A string of the JSON text, with the offset of its first character."""

    start: int


def _located(text: str, start: int, strict: bool = True) -> tuple[_Text, int]:
    value, end = scanstring(text, start, strict)
    located = _Text(value)
    located.start = start
    return located, end


def _cells(text: str) -> Iterator[tuple[int, list[_Text]]]:
    """Yield the number of each code cell, from 1, and the strings of its source."""
    decoder: Any = json.JSONDecoder()
    decoder.parse_string = _located
    decoder.scan_once = py_make_scanner(decoder)
    for number, cell in enumerate(decoder.decode(text)["cells"], 1):
        source = cell.get("source", [])
        if cell["cell_type"] == "code":
            pieces = source if isinstance(source, list) else [source]
            first = pieces[0] if pieces else ""
            if not first.startswith("%%") or _PYTHON_CELLS.match(first):
                yield number, pieces


def _python(cell: str) -> str:
    """Return ``cell`` with a number and spaces in place of each command for IPython or the shell.

    A command begins a logical line, follows ``name =``, or is a logical line that ends in ``?``.
    """
    try:
        parse(cell)
    except UnreadableError:
        pass
    else:
        return cell
    at = start = depth = 0  # start: of the logical line
    commands = []
    while at < len(cell):
        command = _COMMAND.match(cell, at) if at == start else None
        token: Any = command or _TOKEN.match(cell, at)
        at = token.end()
        if command or token[0] == "?":
            commands.append((command.end(1) if command else start, at))
        depth += _DEPTHS.get(token[0], 0)
        if token[0] == "\n" and depth <= 0:
            start, depth = at, 0
    for begin, end in commands:
        text = cell[begin:end]
        indent = text[: len(text) - len(text.lstrip())]
        cell = cell[:begin] + indent + "0" + _VISIBLE.sub(" ", text[len(indent) + 1 :]) + cell[end:]
    return cell


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
    pieces: list[tuple[int, int, _Text]] = []  # the number of the cell, the offset in the program, and the string
    program = ""
    for number, texts in cells:
        at = len(program)
        for one in texts:
            pieces.append((number, at, one))
            at += len(one)
        program += _python("".join(texts)) + "\n"
    rewritten = rewrite(program)
    file, source = Source(text), Source(program)
    edits: list[Edit] = []
    findings = []
    for finding in rewritten.findings:
        start = source.line_start(finding.line) + finding.column - 1
        end = source.line_start(finding.end_line) + finding.end_column - 1
        # A text inserted between two pieces belongs to the piece whose line it continues.
        around = [one for one in pieces if one[1] <= start and end <= one[1] + len(one[2]) and one[2]]
        if not around:
            raise UnreadableError("F901", f"line {finding.line} of its program is in several strings")
        cell, first, piece = around[0 if (finding.after or "").startswith("\n") else -1]
        begin, stop = (_in_file(text, piece, at - first) for at in (start, end))
        if finding.status == "changed":
            edits.append(Edit(begin, stop, json.dumps(finding.after, ensure_ascii=False)[1:-1]))
        (line, column), (end_line, end_column) = file.place(begin), file.place(stop)
        places: dict[str, Any] = {"line": line, "column": column, "end_line": end_line, "end_column": end_column}
        message = f"cell {cell}" + (f": {finding.message}" if finding.message else "")
        findings.append(replace(finding, path=path, message=message, **places))
    return Rewritten(apply_edits(text, edits).encode("utf-8") if edits else data, tuple(findings))


def _in_file(text: str, piece: _Text, offset: int) -> int:
    """Return the offset in the JSON text of a string's character number ``offset``."""
    at = piece.start
    for _ in range(offset):
        at = _ESCAPE.match(text, at).end()  # type: ignore[union-attr]
    return at
