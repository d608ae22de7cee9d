# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Report arithmetic in place on weights that amp keeps in 16 bits (O2 and O5). Apex computes it on float32 masters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence, Set

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.syntax import argument, constant, is_told, last_name, text

_OF_AMP = re.compile(r"apex(_npu)?\.amp\.(frontend\.|handle\.)?\w+")
# Functions and, with a line after them, methods that work in place.
_ARITHMETIC = re.compile("add(bmm|cdiv|cmul|mm|mv|r)?|baddbmm|div(ide)?|lerp|mul(tiply)?|pow|sub(tract)?|true_divide")
# Functions that return the elements of their first argument; chain those of all, filter those of the second one.
_SAME_ELEMENTS = ("chain", "filter", "iter", "list", "reversed", "set", "sorted", "tqdm", "tuple")
_ROUNDS = (
    "at O2 and O5 this is computed in 16 bits, and rounds: loop over amp.master_params(optimizer) instead, "
    "or put it into `with amp.float32_params(optimizer):`"
)
# The link of reports on a program to which amp is added. They are dropped if it is not added after all.
ADDED = "amp is added"


def check(program: Program) -> None:
    """Report what the rule finds in a program that uses amp."""
    calls = [call for call in program.every(ast.Call) if _OF_AMP.fullmatch(program.dotted(call.func))]
    initialized = [call for call in calls if program.dotted(call.func).endswith(".initialize")]
    casts = [call for call in initialized if _casts(call)]
    others = [call for call in calls if call not in initialized]
    if initialized and not casts:
        return
    names = {name for call in others for name in _names(program, call)}
    names -= {name for call in initialized for name in _names(program, call)}
    names |= {name for call in casts for name in _names(program, call)}
    report(program, names - {""}, [*map(program.statement_of, casts)])


def _casts(call: ast.Call) -> bool:
    """Return whether a call of ``amp.initialize`` may make weights of 16 bits."""
    level = argument(call, 3, "opt_level") or (ast.Constant("O1") if is_told(call) else None)
    is_other = isinstance(level, ast.Constant) and level.value not in ("O2", "O5")
    return not is_other and constant(argument(call, 2, "enabled")) is not False


def _names(program: Program, call: ast.Call) -> Iterator[str]:
    """Yield the names that a call gets and returns."""
    parent = program.parent(call)
    targets = parent.targets if isinstance(parent, ast.Assign) else []
    for one in (*call.args, *(keyword.value for keyword in call.keywords), *targets):
        yield from _elements(one)


def report(program: Program, names: Set[str], after: Sequence[ast.stmt], links: tuple[str, ...] = ()) -> None:
    """Report arithmetic on weights in loops over ``param_groups`` or ``parameters()`` of optimizers and models.

    What stands before all statements ``after``, in the blocks around them, is computed on weights of 32 bits.
    """
    loops = _Loops(program, names)
    early = [set(_before(program, statement)) for statement in after]
    for node in (*program.every(ast.Call, ast.Assign), *program.every(ast.AugAssign)) if names else ():
        written = _written(node)
        of = None if written is None else _tensor(written)
        if written is None or of is None or loops.kind(of) != "weight" or _is_float32(program, node):
            continue
        if not early or not all(one & {node, *program.around(node)} for one in early):
            program.refuse("X251", written, _ROUNDS, links)


def _before(program: Program, statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements that stand before a statement, or before one around it, in the same function."""
    function = program.function_of(statement)
    for at in (statement, *program.around(statement)):
        if at is function:
            return
        if isinstance(at, ast.stmt):
            body = program.body_of(at)
            yield from body[: body.index(at)]


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
        if node.func.attr.endswith("_") and _ARITHMETIC.fullmatch(node.func.attr[:-1]):
            return target
    else:
        target, values = node.targets[0], [node.value]
        copies = isinstance(target, ast.Attribute) and target.attr == "data"
    # p.copy_(p * decay), p.data = p.data.mul(decay)
    tensor = _tensor(target) if copies else None
    again = tensor is not None and any(
        isinstance(one, ast.Name) and one.id == tensor.id
        for value in values
        for operation in _inside(value)
        if isinstance(operation, ast.BinOp)
        or (isinstance(operation, ast.Call) and _ARITHMETIC.fullmatch(last_name(operation.func)))
        for one in _inside(operation)
    )
    return target if again else None


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those in it, except for what stands in brackets after another one."""
    todo = [node]
    while todo:
        one = todo.pop()
        yield one
        todo += [one.value] if isinstance(one, ast.Subscript) else ast.iter_child_nodes(one)


def _tensor(node: ast.AST) -> ast.Name | None:
    """Return the name of the tensor whose values ``node`` shares: ``p`` for ``p.data`` and ``p.detach()[0]``."""
    while True:
        if isinstance(node, ast.Attribute) and node.attr in ("data", "detach"):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return node if isinstance(node, ast.Name) else None


class _Loops:
    """What loops of a program take from the optimizers and models ``names``: a "weight", a "group", or ""."""

    def __init__(self, program: Program, names: Set[str]) -> None:
        self._program, self._names = program, names

    def kind(self, node: ast.Name) -> str:
        """Return what a name is, by the innermost loop that binds it; "" if its block gives the name another value."""
        inner: ast.AST = node
        scope = self._program.names.scope
        home = scope(node).find(node.id)
        for at in self._program.around(node):
            is_loop = isinstance(at, (ast.For, ast.comprehension)) and inner is not at.iter
            loops = [at] if is_loop else getattr(at, "generators", [])
            for loop in reversed(loops[: loops.index(inner)] if inner in loops else loops):
                if any(scope(one).find(node.id) is home for one in _named(loop.target, node.id)):
                    body = [one for part in getattr(loop, "body", []) for one in _named(part, node.id)]
                    again = any(self._is_stored(one) and scope(one).find(node.id) is home for one in body)
                    return "" if again else self._taken(loop.target, loop.iter, node.id)
            inner = at
        return ""

    def _is_stored(self, node: ast.Name) -> bool:
        return isinstance(node.ctx, ast.Store) and not isinstance(self._program.parent(node), ast.AugAssign)

    def _taken(self, target: ast.expr, iterable: ast.expr, name: str) -> str:
        """Return what ``name`` in the target of a loop takes from an iterable."""
        for part in _parts(iterable):
            called = last_name(part.func) if isinstance(part, ast.Call) else ""
            pairs: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(target, ast.Tuple):
                if isinstance(part, ast.Call) and called in ("zip", "enumerate"):
                    pairs = [*zip(target.elts[called == "enumerate" :], part.args, strict=False)]
                elif called == "named_parameters":
                    pairs = [(target.elts[-1], part)]
                kinds = [self._taken(one, each, name) for one, each in pairs]
            else:
                kinds = [self._elements(part)] if getattr(target, "id", "") == name else []
            if any(kinds):
                return next(filter(None, kinds))
        return ""

    def _elements(self, node: ast.expr) -> str:
        """Return what the elements of an iterable are."""
        if isinstance(node, ast.Call) and last_name(node.func) == "from_iterable" and node.args:
            return self._elements(getattr(node.args[0], "elt", node.args[0]))
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self.kind(node.elt) if isinstance(node.elt, ast.Name) else ""
        if isinstance(node, ast.Subscript):
            if constant(node.slice) == "params":  # group["params"], optimizer.param_groups[0]["params"]
                group = node.value.value if isinstance(node.value, ast.Subscript) else node.value
                kind = self.kind(group) if isinstance(group, ast.Name) else self._elements(group)
                return "weight" if kind == "group" else ""
            kinds = [self._elements(part) for part in _parts(node.value)]
            return next(filter(None, kinds), "") if isinstance(node.slice, ast.Slice) else ""
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(called, ast.Attribute):
            owner, is_call = text(called.value), isinstance(node, ast.Call)
            if owner in self._names or any(owner.startswith(f"{model}.") for model in self._names):
                if called.attr in ("parameters", "named_parameters") and is_call:
                    return "weight"
                return "group" if called.attr == "param_groups" and not is_call else ""
        return ""


def _named(node: ast.AST, name: str) -> Iterator[ast.Name]:
    """Yield the places in ``node`` that use or bind ``name``."""
    return (one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id == name)


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the iterables whose elements an iterable has: the arguments of ``chain``, or the iterable itself."""
    called = last_name(node.func) if isinstance(node, ast.Call) else ""
    if isinstance(node, ast.Call) and called in _SAME_ELEMENTS:
        first = 1 if called == "filter" else 0
        for one in node.args if called == "chain" else node.args[first : first + 1]:
            yield from _parts(one)
    else:
        yield node


def _is_float32(program: Program, node: ast.AST) -> bool:
    """Return whether a block of ``amp.float32_params`` is around ``node``."""
    items = [item.context_expr for at in program.around(node) if isinstance(at, ast.With) for item in at.items]
    return any(isinstance(one, ast.Call) and program.dotted(one.func).endswith("amp.float32_params") for one in items)
