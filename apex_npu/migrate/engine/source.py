# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The text of a file, and edits of spans in it. All other bytes of the file stay the same."""

from __future__ import annotations

import ast
import codecs
import io
import re
import tokenize
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_LINE_END = re.compile(r"\r\n|\r|\n")
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
_COMMA, _LINE_REST = re.compile(r"(\s*,)?"), re.compile(r"[ \t]*(#.*)?$", re.MULTILINE)


class UnreadableError(Exception):
    """A file that the rules cannot read: the id of a rule of the family F, and the reason."""

    def __init__(self, rule: str, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.rule, self.reason, self.line = rule, reason, line


@dataclass(frozen=True)
class Edit:
    """A replacement of the span from ``start`` to before ``end`` by ``text``."""

    start: int
    end: int
    text: str


def apply_edits(text: str, edits: Iterable[Edit], start: int = 0, end: int | None = None) -> str:
    """Return ``text[start:end]`` after ``edits``, which lie inside of it and do not overlap."""
    pieces = []
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        pieces += [text[start : edit.start], edit.text]
        start = edit.end
    return "".join([*pieces, text[start:end]])


def without(source: Source, spans: Sequence[tuple[int, int]], gone: Sequence[bool]) -> list[Edit]:
    """Return edits that remove some of the elements, separated by commas, that ``spans`` gives in their order."""
    if all(gone):
        return [Edit(spans[0][0], spans[-1][1], "")]
    last = len(gone) - gone[::-1].index(False)  # all elements from here on are removed
    edits = [Edit(spans[at][0], spans[at + 1][0], "") for at in range(last) if gone[at]]
    if last == len(gone):
        return edits
    before, start, end = spans[last - 1][1], spans[last][0], spans[-1][1]
    between = source.text[before:start]
    if "\n" not in between:
        return [*edits, Edit(before + between.index(","), end, "")]
    # A comment may follow the element before, so the comma of that element stays.
    end += len(_COMMA.match(source.text, end)[0])  # type: ignore[index]
    if _LINE_REST.match(source.text, end) and not between.rpartition("\n")[2].strip():
        start, end = before + between.rindex("\n"), source.line_end(source.place(end)[0])
    return [*edits, Edit(start, end, "")]


class Source:
    """The text of a Python file.

    Args:
        data: The text, or the bytes of the file, which are decoded by the encoding that the file names.

    Raises:
        UnreadableError: The bytes are not text in that encoding.
    """

    def __init__(self, data: bytes | str) -> None:
        self.encoding, self.bom = "utf-8", b""
        if isinstance(data, bytes):
            data = self._decode(data)
        self.text = data
        self._starts = [0, *(match.end() for match in _LINE_END.finditer(data))]

    def _decode(self, data: bytes) -> str:
        if data.startswith(codecs.BOM_UTF8):
            self.bom, data = codecs.BOM_UTF8, data[len(codecs.BOM_UTF8) :]
        try:
            self.encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
            text = data.decode(self.encoding)
            same = text.encode(self.encoding) == data
        except (SyntaxError, UnicodeError, LookupError) as error:
            raise UnreadableError("F903", f"the file cannot be decoded ({error})") from None
        if not same:
            raise UnreadableError("F903", f"decoding from {self.encoding} and encoding again gives other bytes")
        return text

    def encode(self, text: str) -> bytes:
        """Return the bytes of ``text`` in this file's encoding."""
        try:
            return self.bom + text.encode(self.encoding)
        except UnicodeError as error:
            raise UnreadableError("F903", f"the new text cannot be encoded ({error})") from None

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a place that ``ast`` gives, whose ``column`` counts bytes of UTF-8."""
        start = self._starts[line - 1]
        part = self.text[start : start + column]
        if not part.isascii():
            part = part.encode()[:column].decode(errors="replace")
        return start + len(part)

    def span(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword | ast.arg) -> tuple[int, int]:
        """Return the offsets of a node's first character, and of the character after its last."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def place(self, offset: int) -> tuple[int, int]:
        """Return the line and the column of an offset. Both count from 1; columns count characters."""
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def line_start(self, line: int) -> int:
        """Return the offset of the first character of a line."""
        return self._starts[line - 1]

    def indent(self, node: ast.stmt) -> str:
        """Return the text before a statement on its line."""
        return self.text[self.line_start(node.lineno) : self.span(node)[0]]

    def line_end(self, line: int) -> int:
        """Return the offset of the end of a line, before its newline."""
        end = self._starts[line] if line < len(self._starts) else len(self.text)
        start = self._starts[line - 1]
        return start + len(self.text[start:end].rstrip("\r\n"))

    def newline(self, line: int) -> str:
        """Return the newline of a line; for the last line, the newline of the first."""
        for one in (line, 1):
            if one < len(self._starts):
                return self.text[self.line_end(one) : self._starts[one]]
        return "\n"


def parse(text: str) -> ast.Module:
    """Return the syntax tree of a program.

    Raises:
        UnreadableError: Python cannot parse it.
    """
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason, line = getattr(error, "msg", error), getattr(error, "lineno", 1)
        raise UnreadableError("F901", f"the file does not parse ({str(reason) or 'too deep'})", line or 1) from None


def tree_of(data: bytes) -> ast.Module:
    """Return the syntax tree of a file, or an empty tree if the file cannot be read."""
    try:
        return parse(Source(data).text)
    except UnreadableError:
        return ast.Module([], [])


def same_tree(one: object, other: object) -> bool:
    """Return whether two trees are equal except for positions. There is no recursion, as expressions can be deep."""
    todo: list[tuple[object, object]] = [(one, other)]
    while todo:
        a, b = todo.pop()
        if type(a) is not type(b):
            return False
        if isinstance(a, ast.AST):
            todo.extend((getattr(a, name, None), getattr(b, name, None)) for name in a._fields)
        elif isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                return False
            todo.extend(zip(a, b, strict=True))
        elif a != b and not (a != a and b != b):
            return False
    return True


def same_elsewhere(source: Source, tree: ast.Module, edits: Sequence[Edit], text: str) -> bool:
    """Return whether ``text`` parses and has all statements of ``source`` that no edit touches, in their places."""
    edits = sorted(edits, key=lambda edit: (edit.start, edit.end))
    # A text that is inserted after a removed statement lies inside the span of the statement's line.
    if any(one.end > other.start and (one.text or other.end > other.start) for one, other in pairwise(edits)):
        return False
    try:
        new, parsed = Source(text), parse(text)
    except UnreadableError:
        return False
    there = {_first(new, node): node for node in ast.walk(parsed) if isinstance(node, ast.stmt)}
    ends = [edit.end for edit in edits]
    shifts = [0, *accumulate(len(edit.text) - (edit.end - edit.start) for edit in edits)]
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            start, (_, end) = _first(source, node), source.span(node)
            inner = next((one for one in ast.walk(node) if isinstance(one, ast.stmt) and one is not node), None)
            number = bisect_right(ends, start)
            untouched = number == len(edits) or edits[number].start >= (_first(source, inner) if inner else end)
            if untouched and not same_tree(_parts(node), _parts(there.get(start + shifts[number]))):
                return False
    return True


def _first(source: Source, node: ast.stmt) -> int:
    """Return the offset where a statement, or its first decorator, begins."""
    return min(source.span(one)[0] for one in (node, *getattr(node, "decorator_list", ())))


def _parts(node: ast.stmt | None) -> list[object]:
    """Return the type and the fields of a statement, without the statements inside of it."""
    fields = [] if node is None else [value for name, value in ast.iter_fields(node) if name not in _BODIES]
    return [type(node), *fields]
