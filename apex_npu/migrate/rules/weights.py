# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Report arithmetic in place on weights that amp keeps in 16 bits (O2 and O5). Apex computes it on float32 masters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.syntax import argument, constant, is_told, last_name, text

_OF_AMP = re.compile(r"apex(_npu)?\.amp\.(frontend\.|handle\.)?\w+")
_ARITHMETIC = re.compile(r"(add|addcdiv|addcmul|div|lerp|mul|pow|sub)_")
_ROUNDS = (
    "at O2 and O5 this is computed in 16 bits, and rounds: loop over amp.master_params(optimizer) instead, "
    "or put it into `with amp.float32_params(optimizer):`"
)
# The link of reports on a program to which amp is added. They are dropped if it is not added after all.
ADDED = "amp is added"


def check(program: Program) -> None:
    """Report what the rule finds in a program that uses amp."""
    names: set[str] = set()
    for call in program.every(ast.Call):
        dotted = program.dotted(call.func)
        if not _OF_AMP.fullmatch(dotted):
            continue
        if dotted.endswith(".initialize"):
            level = argument(call, 3, "opt_level") or (ast.Constant("O1") if is_told(call) else None)
            if isinstance(level, ast.Constant) and level.value not in ("O2", "O5"):
                return
        parent = program.parent(call)
        targets = parent.targets if isinstance(parent, ast.Assign) else []
        for one in (*call.args, *(keyword.value for keyword in call.keywords), *targets):
            names.update(_elements(one))
    report(program, names - {""})


def report(program: Program, names: Set[str], links: tuple[str, ...] = ()) -> None:
    """Report arithmetic on weights in loops over ``param_groups`` or ``parameters()`` of optimizers and models."""
    for node in (*program.every(ast.Call, ast.Assign), *program.every(ast.AugAssign)) if names else ():
        written = _written(node)
        if written is not None and _is_weight(program, node, _name(written), names) and not _is_float32(program, node):
            program.refuse("X251", written, _ROUNDS, links)


def _elements(node: ast.expr) -> Iterator[str]:
    """Yield the names in an expression or in a list, as the program writes them."""
    if isinstance(node, (ast.List, ast.Tuple)):
        for one in node.elts:
            yield from _elements(one)
    else:
        yield text(node)


def _written(node: ast.Call | ast.Assign | ast.AugAssign) -> ast.expr | None:
    """Return the tensor that a node changes by arithmetic in place, or None."""
    if isinstance(node, ast.AugAssign):
        return node.target
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Attribute):
            return None
        target, values, copies = node.func.value, node.args, node.func.attr == "copy_"
        if _ARITHMETIC.fullmatch(node.func.attr):
            return target
    else:
        target, values = node.targets[0], [node.value]
        copies = isinstance(target, ast.Attribute) and target.attr == "data"
    # p.copy_(p * decay), p.data = p.data * decay
    inside = [one for value in values for one in ast.walk(value)]
    again = any(isinstance(one, ast.Name) and one.id == _name(target) for one in inside)
    return target if copies and again and any(isinstance(one, ast.BinOp) for one in inside) else None


def _name(node: ast.AST) -> str:
    """Return the name of the tensor whose values ``node`` shares: ``p`` for ``p.data`` and ``p.detach()[0]``."""
    while True:
        if isinstance(node, ast.Attribute) and node.attr in ("data", "detach"):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return node.id if isinstance(node, ast.Name) else ""


def _is_weight(program: Program, node: ast.AST, name: str, names: Set[str]) -> bool:
    """Return whether loops around ``node`` take ``name`` from the weights of one of ``names``."""
    sources = [*_sources(program, node, name)] if name else []
    of_groups = "params" in map(constant, sources)
    for one in sources:
        weights = ("parameters", "named_parameters", *(["param_groups"] if of_groups else []))
        if isinstance(one, ast.Attribute) and one.attr in weights:
            owner = text(one.value)
            if owner in names or any(owner.startswith(f"{model}.") for model in names):
                return True
    return False


def _sources(program: Program, node: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the nodes of the iterables of the loops that bind ``name``, and of those that bind a name in them."""
    for at in program.around(node):
        for loop in [at] if isinstance(at, ast.For) else getattr(at, "generators", []):
            given = _given(loop.target, loop.iter, name)
            for one in () if given is None else ast.walk(given):
                yield one
                if isinstance(one, ast.Name) and one.id != name:  # for p in group["params"]
                    yield from _sources(program, at if loop is at else loop.iter, one.id)


def _given(target: ast.expr, iterable: ast.expr, name: str) -> ast.expr | None:
    """Return what a loop takes ``name`` from: its iterable, or an argument of ``zip``; None for other loops."""
    if isinstance(target, ast.Tuple) and isinstance(iterable, ast.Call) and last_name(iterable.func) == "zip":
        pairs = zip(target.elts, iterable.args, strict=False)
        return next((found for one, each in pairs if (found := _given(one, each, name)) is not None), None)
    derived = isinstance(iterable, (ast.ListComp, ast.GeneratorExp)) and not isinstance(iterable.elt, ast.Name)
    return iterable if not derived and any(getattr(one, "id", "") == name for one in ast.walk(target)) else None


def _is_float32(program: Program, node: ast.AST) -> bool:
    """Return whether a block of ``amp.float32_params`` is around ``node``."""
    items = [item.context_expr for at in program.around(node) if isinstance(at, ast.With) for item in at.items]
    return any(isinstance(one, ast.Call) and program.dotted(one.func).endswith("amp.float32_params") for one in items)
