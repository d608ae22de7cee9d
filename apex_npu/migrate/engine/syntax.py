# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Syntax helpers: names as written, and what calls pass."""

from __future__ import annotations

import ast

LOOPS = (ast.For, ast.AsyncFor, ast.While)
_UNKNOWN = object()


def root_of(node: ast.AST) -> ast.AST:
    """Return the expression whose attribute, or an attribute of whose attribute, ``node`` is."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def text(node: ast.AST) -> str:
    """Return a name or attribute as the program writes it, and "" for other expressions."""
    return ast.unparse(node) if isinstance(root_of(node), ast.Name) else ""


def last_name(node: ast.AST | None) -> str:
    """Return a name, or the name of an attribute of any expression, and "" for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def method_of(call: ast.Call) -> tuple[str, str]:
    """Return the object whose method is called, as written, and the method's name."""
    return (text(call.func.value), call.func.attr) if isinstance(call.func, ast.Attribute) else ("", "")


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


def keywords(call: ast.Call) -> dict[str | None, ast.expr]:
    """Return the values that a call passes by name; that of ``**`` has the name None."""
    return {one.arg: one.value for one in call.keywords}


def constant(node: ast.AST | None) -> object:
    """Return the value of a literal; for other expressions an object that equals nothing else."""
    return node.value if isinstance(node, ast.Constant) else _UNKNOWN


def is_told(call: ast.Call) -> bool:
    """Return whether the arguments of a call are known: it has no * or **."""
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    return not starred and all(one.arg is not None for one in call.keywords)
