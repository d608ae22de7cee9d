# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Detect gradients that a program averages over processes itself. amp cannot make all processes skip a step then."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.syntax import given_to, last_name, text

_COLLECTIVE = re.compile(r"torch\.distributed\..*(reduce|gather|broadcast|all_to_all)\w*")
# Names of functions in other libraries and files that average gradients.
_NAMED_SO = re.compile(r"all_?reduce|(average|reduce|sync)\w*grad", re.IGNORECASE)
# The results of these functions on a gradient are not gradients.
_NO_GRADIENT = re.compile("all|any|isfinite|isinf|isnan|item|max|mean|min|norm|numel|size|sum")
_KEPT_BY = ("add", "append", "extend", "insert")

# A variable: the scope that binds it, and its name. Attributes are known by their text only, and what a function
# returns by _RETURNED and the name of the function.
_Variable = tuple[object, str]
_RETURNED = "returned"


class Averages:
    """The flow of gradients in one file, from ``.grad`` through names, lists and functions to collectives."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._calls = [*program.every(ast.Call)]
        self._functions = {node.name: node for node in program.every(ast.FunctionDef)}
        self._variables: set[_Variable] = set()
        has_gradients = any(node.attr == "grad" for node in program.every(ast.Attribute))
        flows = [flow for node in program.names.nodes for flow in self._flows(node)] if has_gradients else []
        size = -1
        while size != (size := len(self._variables)):
            for value, targets in flows:
                if self.is_gradient(value):
                    self._variables |= targets

    def calls(self) -> Iterator[ast.Call]:
        """Yield the collectives that get gradients, and calls of functions in other files that are named like one."""
        for call in self._calls:
            dotted = self.program.dotted(call.func)
            name = last_name(call.func)
            elsewhere = name not in self._functions and not dotted.startswith("torch.")
            collective = _COLLECTIVE.fullmatch(dotted) or (elsewhere and _NAMED_SO.search(name))
            if collective and any(map(self.is_gradient, [*call.args, *(one.value for one in call.keywords)])):
                yield call

    def is_gradient(self, node: ast.AST) -> bool:
        """Return whether an expression contains gradients."""
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if _NO_GRADIENT.fullmatch(name):
                return False
            if (_RETURNED, name) in self._variables:
                return True
        named = isinstance(node, (ast.Name, ast.Attribute)) and text(node)
        if getattr(node, "attr", "") == "grad" or (named and self._variable(node) in self._variables):
            return True
        return any(map(self.is_gradient, ast.iter_child_nodes(node)))

    def _variable(self, node: ast.AST) -> _Variable:
        name = text(node)
        return (None if "." in name else self.program.names.scope(node).find(name), name)

    def _stored(self, target: ast.AST) -> set[_Variable]:
        """Return the variables that an assignment to ``target`` binds, or whose elements it sets."""
        while isinstance(target, (ast.Subscript, ast.Starred)):
            target = target.value
        if isinstance(target, (ast.Tuple, ast.List)):
            return set().union(*map(self._stored, target.elts))
        return {self._variable(target)} if text(target) else set()

    def _flows(self, node: ast.AST) -> Iterator[tuple[ast.AST, set[_Variable]]]:
        """Yield what a node stores or returns: the value, and the variables that get it."""
        if isinstance(node, ast.Assign):
            yield from ((node.value, self._stored(target)) for target in node.targets)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            yield node.value, self._stored(node.target)
        elif isinstance(node, (ast.For, ast.comprehension)):
            yield node.iter, self._stored(node.target)
        elif isinstance(node, ast.Return) and node.value is not None:
            yield node.value, {(_RETURNED, getattr(self.program.names.scope(node).node, "name", ""))}
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _KEPT_BY:
                kept = node.func.value
                if isinstance(kept, ast.Call):  # d.setdefault(key, []).append
                    kept = getattr(kept.func, "value", kept.func)
                yield from ((one, self._stored(kept)) for one in node.args)
            function = self._functions.get(text(node.func).rpartition(".")[2])
            if function is not None:
                inside = self.program.names.scope(function.body[0])
                for name, value in given_to(function, node).items():
                    yield value, {(inside, name)}
