# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Syntax helpers: names as written, and the statements, functions and lines around a node."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .program import Program

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def text(node: ast.AST) -> str:
    """Return a name or attribute as the program writes it, and "" for other expressions."""
    at = node
    while isinstance(at, ast.Attribute):
        at = at.value
    return ast.unparse(node) if isinstance(at, ast.Name) else ""


def method_of(call: ast.Call) -> tuple[str, str]:
    """Return the object whose method is called, as written, and the method's name."""
    return (text(call.func.value), call.func.attr) if isinstance(call.func, ast.Attribute) else ("", "")


def around(program: Program, node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that contain ``node``, the innermost first."""
    at = program.parent(node)
    while at is not None:
        yield at
        at = program.parent(at)


def function_of(program: Program, node: ast.AST) -> ast.AST:
    """Return the function around ``node``, or the module."""
    return next((one for one in around(program, node) if isinstance(one, _FUNCTIONS)), program.tree)


def body_of(program: Program, statement: ast.stmt) -> list[ast.stmt]:
    """Return the block that ``statement`` is in, as a list of statements."""
    parent = program.parent(statement)
    fields = [value for _, value in ast.iter_fields(parent)] if parent is not None else []
    return next(body for body in fields if isinstance(body, list) and any(one is statement for one in body))


def has_own_lines(program: Program, statement: ast.stmt) -> bool:
    """Return whether the lines of ``statement`` have nothing else but a comment."""
    source = program.source
    start, end = source.span(statement)
    before = source.text[source.line_start(statement.lineno) : start]
    after = source.text[end : source.line_end(statement.end_lineno or 0)].strip()
    return not before.strip() and (not after or after.startswith("#"))


def is_argument(program: Program, node: ast.AST, name: str) -> bool:
    """Return whether ``name`` is an argument of a function around ``node`` and has no other binding there."""
    home = program.names.scope(node).find(name)
    arguments = home.node.args if home is not None and isinstance(home.node, _FUNCTIONS) else None
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs] if arguments else []
    return home is not None and any(one.arg == name for one in given) and len(home.bindings[name]) == 1


def given_to(function: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    """Return the values that ``call`` passes to ``function``, by argument name."""
    places = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    named = {*places, *(one.arg for one in function.args.kwonlyargs)}
    given = dict(zip(places[places[:1] == ["self"] :], call.args, strict=False))
    return given | {one.arg: one.value for one in call.keywords if one.arg in named}


def argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    """Return the value that a call passes for an argument, by place or name."""
    given = [*call.args[place : place + 1], *(one.value for one in call.keywords if one.arg == name)]
    return given[0] if given else None


def is_told(call: ast.Call) -> bool:
    """Return whether the arguments of a call are known: it has no * or **."""
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    return not starred and all(one.arg is not None for one in call.keywords)
