# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Detect gradients that a program averages over processes itself. amp cannot make all processes skip a step then."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.syntax import given_to, last_name, text

_COLLECTIVE = re.compile(r"torch\.distributed\..*(reduce|gather|broadcast|all_to_all)\w*")
# Names of functions in other libraries and files that average gradients.
_NAMED_SO = re.compile(r"all_?reduce|(average|reduce|sync)\w*grad", re.IGNORECASE)
# The results of these functions on a gradient are not gradients.
_NO_GRADIENT = re.compile("all|any|isfinite|isinf|isnan|item|max|mean|min|norm|numel|size|sum")
_KEPT_BY = ("add", "append", "extend", "insert")

# A variable: the scope that binds it and its name, or "returned" and a function. Attributes are known by their text.
_Variable = tuple[object, str]


def averaged(program: Program) -> Iterator[ast.Call]:
    """Yield the collectives that get gradients, and calls of functions in other files that are named like one.

    Gradients are followed from ``.grad`` through names, lists and functions of the file.
    """
    if not any(node.attr == "grad" for node in program.every(ast.Attribute)):
        return
    functions = {node.name: node for node in program.every(ast.FunctionDef)}
    flows = [flow for node in program.names.nodes for flow in _flows(program, node, functions)]
    held: set[_Variable] = set()
    while grown := set().union(*(targets for value, targets in flows if _holds(program, value, held))) - held:
        held |= grown
    for call in program.every(ast.Call):
        dotted, name = program.dotted(call.func), last_name(call.func)
        elsewhere = name not in functions and not dotted.startswith("torch.")
        collective = _COLLECTIVE.fullmatch(dotted) or (elsewhere and _NAMED_SO.search(name))
        given = [*call.args, *(one.value for one in call.keywords)]
        if collective and any(_holds(program, one, held) for one in given):
            yield call


def _holds(program: Program, node: ast.AST, held: set[_Variable]) -> bool:
    """Return whether an expression contains gradients, which the variables ``held`` do."""
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        if _NO_GRADIENT.fullmatch(name):
            return False
        if ("returned", name) in held:
            return True
    if getattr(node, "attr", "") == "grad" or (text(node) and _variable(program, node) in held):
        return True
    return any(_holds(program, one, held) for one in ast.iter_child_nodes(node))


def _variable(program: Program, node: ast.AST) -> _Variable:
    name = text(node)
    return (None if "." in name else program.names.scope(node).find(name), name)


def _stored(program: Program, target: ast.AST) -> set[_Variable]:
    """Return the variables that an assignment to ``target`` binds, or whose elements it sets."""
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*(_stored(program, one) for one in target.elts))
    return {_variable(program, target)} if text(target) else set()


def _flows(
    program: Program, node: ast.AST, functions: Mapping[str, ast.FunctionDef]
) -> Iterator[tuple[ast.AST, set[_Variable]]]:
    """Yield what a node stores or returns: the value, and the variables that get it."""
    if isinstance(node, ast.Assign):
        yield from ((node.value, _stored(program, target)) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        yield node.value, _stored(program, node.target)
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield node.iter, _stored(program, node.target)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield node.value, {("returned", getattr(program.names.scope(node).node, "name", ""))}
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _KEPT_BY:
            kept = node.func.value
            if isinstance(kept, ast.Call):  # d.setdefault(key, []).append
                kept = getattr(kept.func, "value", kept.func)
            yield from ((one, _stored(program, kept)) for one in node.args)
        function = functions.get(last_name(node.func))
        if function is not None:
            inside: object = program.names.scope(function.body[0])
            yield from ((value, {(inside, name)}) for name, value in given_to(function, node).items())
