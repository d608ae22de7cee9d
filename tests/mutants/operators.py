# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mutants of Python and C++ sources: each is one small change of one place inside a function.

Python's operators change syntax trees: a comparison, an arithmetic or logical operator, a condition, a number, a
boolean, a returned value; or they delete a call, a raise or a write to an attribute or an element. C++'s operators
replace a token. A mutant keeps the number of lines of its file, so that recorded line numbers stay valid.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
TOKENS = (
    (" < ", " <= "),
    (" > ", " >= "),
    (" <= ", " < "),
    (" >= ", " > "),
    (" == ", " != "),
    (" != ", " == "),
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " / "),
    (" / ", " * "),
    (" && ", " || "),
    (" || ", " && "),
    ("true", "false"),
    ("false", "true"),
)


class Mutant(NamedTuple):
    """One change of the source at ``path``.

    Attributes:
        lines: The first and the last line (from 1) of the statement or the expression that is changed.
        begin, end: The range of bytes that ``text`` replaces.
    """

    path: str
    lines: tuple[int, int]
    begin: int
    end: int
    text: str
    kind: str

    def apply(self, source: bytes) -> bytes:
        """The mutated source."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def python_mutants(path: str, source: bytes) -> list[Mutant]:
    """All mutants of one module, in the order of the source."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, text, kind in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        breaks = "\n" * source[begin:end].count(b"\n")
        text = text + breaks if isinstance(node, ast.stmt) else f"({text}{breaks})"
        found.append(Mutant(path, (node.lineno, node.end_lineno), begin, end, text, kind))
    return sorted(found)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    for function in _functions(tree):
        for statement in function.body:
            yield from _changes_in(statement)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The outermost functions and methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node)


def _changes_in(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
        return
    if isinstance(node, ast.Raise):
        yield node, "pass", "raise deleted"
        return  # what it says is not tested word by word
    yield from _changes_of(node)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes_in(child)


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed = copy.copy(node)
        changed.ops = [COMPARISONS[type(node.ops[0])]()]
        yield node, ast.unparse(changed), "comparison"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        changed = copy.copy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        yield node, ast.unparse(changed), "arithmetic"
    elif isinstance(node, ast.BoolOp):
        changed = copy.copy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, ast.unparse(changed), "and, or"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, ast.unparse(node.operand), "not deleted"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        changed_value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield node, repr(changed_value), "constant"
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield node.test, f"not ({ast.unparse(node.test)})", "condition"
    elif isinstance(node, ast.Return) and not (node.value is None or _is_none(node.value)):
        yield node, "return None", "return value"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass", "call deleted"
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Assign) and any(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets)
    ):
        yield node, "pass", "write deleted"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def cpp_mutants(path: str, source: bytes) -> list[Mutant]:
    """All mutants of one C++ file: tokens of lines that are neither comments, preprocessor lines nor messages."""
    found, begin = [], 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        text = line.decode()
        if text.startswith((" ", "\t")) and not re.search(r'//|/\*|^\s*\*|#|"|template|static_assert', text):
            for token, other in TOKENS:
                for match in re.finditer(re.escape(token), text):
                    at = begin + len(text[: match.start()].encode())
                    found.append(Mutant(path, (number, number), at, at + len(token), other, token.strip()))
        begin += len(line)
    return sorted(found)


def mutants_of(root: Path, folder: str) -> list[Mutant]:
    """All mutants of the sources in ``folder`` of the checkout ``root``."""
    found = []
    for path in sorted((root / folder).rglob("*")):
        name = str(path.relative_to(root))
        if path.suffix == ".py":
            found += python_mutants(name, path.read_bytes())
        elif path.suffix in (".cpp", ".h"):
            found += cpp_mutants(name, path.read_bytes())
    return found
