# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Notebooks. Their code cells are rewritten as one program. All other bytes of the JSON text stay the same.

The source of a cell is a string, or a list of strings, as Jupyter writes it: one for each line.
"""

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
# Commands that run the code after them.
_TIMED = re.compile(r"%time(?:it)?[ \t]+")
# Strings, comments, and a backslash with what it escapes are one token each.
_TOKEN = re.compile(
    r"""(\"{3}|'{3})(?:\\.|(?!\1).)*(?:\1|\Z) | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | \#[^\n]*
    | \\(?:\r\n|.) | .""",
    re.DOTALL | re.VERBOSE,
)
_DEPTHS = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)
_PYTHON_CELLS = re.compile(r"%%(time|timeit|capture|prun)\b")


class _Text(str):
    """A string of the JSON text, with the offsets of its first character and of its closing quote."""

    start: int
    end: int


def _located(text: str, start: int, strict: bool = True) -> tuple[_Text, int]:
    value, end = scanstring(text, start, strict)
    located = _Text(value)
    located.start, located.end = start, end - 1
    return located, end


def _cells(text: str) -> Iterator[tuple[int, list[_Text], str]]:
    """Yield the number of each code cell, from 1, the strings of its source, and the text between two of its lines."""
    decoder: Any = json.JSONDecoder()
    decoder.parse_string = _located
    decoder.scan_once = py_make_scanner(decoder)
    for number, cell in enumerate(decoder.decode(text)["cells"], 1):
        source = cell.get("source", [])
        if cell["cell_type"] == "code":
            pieces = source if isinstance(source, list) else [source]
            if pieces and (not pieces[0].startswith("%%") or _PYTHON_CELLS.match(pieces[0])):
                yield number, pieces, _between(text, source)


def _between(text: str, source: _Text | list[_Text]) -> str:
    """Return the JSON text between two lines of a cell: nothing if its source is one string."""
    if isinstance(source, str):
        return ""
    if len(source) > 1:
        return text[source[0].end : source[1].start]
    start = source[0].start - 1
    return f'",{text[text.rindex("[", 0, start) + 1 : start] or " "}"'


def _python(cell: str) -> str:
    """Return ``cell`` with a number and spaces in place of each command for IPython or the shell.

    A command begins a logical line, follows ``name =``, or is a logical line that ends in ``?``. The code of ``%time``
    stays.
    """
    if _is_python(cell):
        return cell
    at = start = depth = 0  # start: of the logical line
    commands = []
    while at < len(cell):
        command = _COMMAND.match(cell, at) if at == start else None
        token: Any = command or _TOKEN.match(cell, at)
        at = token.end()
        if command or token[0] == "?":
            begin = command.end(1) if command else start
            timed = _TIMED.match(cell, begin, at)
            has_code = timed is not None and _is_python(f"0;{cell[timed.end() : at]}")
            commands.append((begin, timed.end() if timed and has_code else at, ";" if has_code else ""))
        depth += _DEPTHS.get(token[0], 0)
        if token[0] == "\n" and depth <= 0:
            start, depth = at, 0
    for begin, end, before_code in commands:
        text = cell[begin:end]
        indent = text[: len(text) - len(text.lstrip())]
        blank = indent + "0" + re.sub(r"\S", " ", text[len(indent) + 1 :])
        cell = cell[:begin] + blank.removesuffix(" " * len(before_code)) + before_code + cell[end:]
    return cell


def _is_python(text: str) -> bool:
    try:
        parse(text)
    except UnreadableError:
        return False
    return True


def rewrite_notebook(data: bytes, path: str, rewrite: Callable[[str], Rewritten]) -> Rewritten:
    """Apply ``rewrite`` to the program of a notebook. The findings have the places in the notebook's file.

    Raises:
        UnreadableError: The file is not a notebook.
    """
    # For each character of the program its cell, its offset in the JSON text, and the text between two lines there.
    places: list[tuple[int, int, str]] = []
    program = ""
    try:
        text = data.decode("utf-8")
        for number, pieces, between in _cells(text):
            for piece in pieces:
                places += [(number, at, between) for at in _offsets(text, piece)]
            places.append((number, pieces[-1].end, between))
            program += _python("".join(pieces)) + "\n"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UnreadableError("F901", f"the file is not a notebook ({type(error).__name__}: {error})") from None
    rewritten = rewrite(program)

    def located(start: int, end: int) -> tuple[int, str, int, int]:
        cell, begin, between = places[min(start, len(places) - 1)]
        # The newline after a cell is not in the notebook.
        last = end if end < len(places) and places[end][0] == cell else end - 1
        if places[last][0] != cell:
            raise UnreadableError("F901", f"line {source.place(start)[0]} of its program is in several cells")
        return cell, between, begin, places[last][1]

    file, source = Source(text), Source(program)
    edits = []
    for edit in rewritten.edits:
        _, between, begin, stop = located(edit.start, edit.end)
        lines = [json.dumps(line, ensure_ascii=text.isascii())[1:-1] for line in edit.text.split("\n")]
        edits.append(Edit(begin, stop, f"\\n{between}".join(lines)))
    findings = []
    for finding in rewritten.findings:
        start = source.line_start(finding.line) + finding.column - 1
        end = source.line_start(finding.end_line) + finding.end_column - 1
        cell, _, begin, stop = located(start, end)
        (line, column), (end_line, end_column) = file.place(begin), file.place(stop)
        new: dict[str, Any] = {"line": line, "column": column, "end_line": end_line, "end_column": end_column}
        message = f"cell {cell}" + (f": {finding.message}" if finding.message else "")
        findings.append(replace(finding, path=path, message=message, **new))
    return Rewritten(apply_edits(text, edits).encode("utf-8") if edits else data, tuple(findings))


def _offsets(text: str, piece: _Text) -> Iterator[int]:
    """Yield the offset in the JSON text of each character of a string."""
    at = piece.start
    while at < piece.end:
        yield at
        at = _ESCAPE.match(text, at).end()  # type: ignore[union-attr]
