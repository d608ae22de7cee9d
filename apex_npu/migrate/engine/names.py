# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Resolve names by imports and scope. A parameter, local, loop or class variable of the same name shadows an import."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from .syntax import constant, root_of

# A binding to something that is neither an import nor an expression of names.
_OPAQUE = None
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SKIPPED = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)

# What a name is bound to: the full name of an import, an expression, or _OPAQUE.
Binding = str | ast.expr | None
# By module, as import statements write it: the names that it exports, and the full names of the imports behind them.
Exports = Mapping[str, Mapping[str, str]]


@dataclass(eq=False)
class Scope:
    """The names that one module, class, function or comprehension binds."""

    node: ast.AST
    outer: Scope | None = None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    elsewhere: dict[str, type[ast.AST]] = field(default_factory=dict)  # global and nonlocal

    def bind(self, name: str, binding: Binding) -> None:
        """Record a binding of ``name`` in this scope, or in the scope that ``global`` or ``nonlocal`` selects."""
        scope = self
        if self.elsewhere.get(name) is ast.Global:
            scope = self.module()
        elif name in self.elsewhere:
            scope = self.outer_with(name) or self
        scope.bindings.setdefault(name, []).append(binding)

    def module(self) -> Scope:
        """Return the outermost scope."""
        return self if self.outer is None else self.outer.module()

    def outer_with(self, name: str) -> Scope | None:
        """Return the nearest scope around this one that binds ``name``. Python skips class bodies, and so does this."""
        scope = self.outer
        while scope is not None and (name not in scope.bindings or isinstance(scope.node, ast.ClassDef)):
            scope = scope.outer
        return scope

    def find(self, name: str) -> Scope | None:
        """Return the scope that binds ``name`` as it is used in this scope, or None."""
        if self.elsewhere.get(name) is ast.Global:
            return self.module() if name in self.module().bindings else None
        return self if name in self.bindings else self.outer_with(name)


class Names:
    """The scopes of a program, and its nodes that have a place in the text, outer ones first.

    ``exports`` resolves the names of other modules. ``stars`` lists the modules that the program imports by ``*``.
    """

    def __init__(self, tree: ast.Module, exports: Exports | None = None) -> None:
        self._exports = exports or {}
        self.stars: list[str] = []
        self.nodes: list[ast.AST] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self.module = Scope(tree)
        self._scopes: dict[ast.AST, Scope] = {}
        self._assigned: set[ast.AST] = set()
        self._late: list[tuple[Scope, str, Binding]] = []  # bound once all nonlocal names are known
        first_iterables: set[ast.AST] = set()  # those of comprehensions, evaluated in the scope around
        todo: list[tuple[ast.AST, Scope]] = [(tree, self.module)]
        while todo:
            node, scope = todo.pop()
            self.nodes.append(node)
            self._scopes[node] = scope
            self._bind(node, scope)
            inner = Scope(node, scope) if isinstance(node, (*FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)) else scope
            if isinstance(node, FUNCTIONS):
                self._late.extend((inner, name, _OPAQUE) for name in _parameters(node.args))
            elif isinstance(node, _COMPREHENSIONS):
                first_iterables.add(node.generators[0].iter)
            inside = _inside(node)
            children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, _SKIPPED)]
            for child in reversed(children):
                self.parents[child] = node
                around = scope.outer if child in first_iterables else None
                todo.append((child, around or (inner if child in inside else scope)))
        for scope, name, binding in self._late:
            scope.bind(name, binding)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        late = self._late
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load) and node not in self._assigned:
                late.append((_of_comprehension(scope, self.parents.get(node)), node.id, _OPAQUE))
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            may_be_module = isinstance(root_of(value), ast.Name) or constant(value) is None
            if isinstance(target, ast.Name) and len(node.targets) == 1 and may_be_module:
                self._assigned.add(target)
                late.append((scope, target.id, value))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                late.append((scope, alias.asname or name, name))
        elif isinstance(node, ast.ImportFrom):
            source = module_of(node)
            exported = self._exports.get(source, {})
            for alias in node.names:
                if alias.name == "*":
                    late.extend((scope, *exported_name) for exported_name in exported.items())
                    self.stars.append(source)
                else:
                    name = f"{source}.{alias.name}"
                    late.append((scope, alias.asname or alias.name, exported.get(alias.name, name)))
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            scope.elsewhere.update(dict.fromkeys(node.names, type(node)))
        elif not isinstance(node, ast.alias):
            # Functions, classes, exception handlers and patterns have the bound name in a field.
            named = (getattr(node, field, None) for field in ("name", "rest"))
            late.extend((scope, name, _OPAQUE) for name in named if isinstance(name, str))

    def scope(self, node: ast.AST) -> Scope:
        """Return the scope in which ``node`` is evaluated."""
        return self._scopes[node]

    def meanings(self, name: str, scope: Scope, seen: frozenset[tuple[Scope, str]] = frozenset()) -> set[str | None]:
        """Return the full names of the imports that ``name`` may refer to, with None if it may be something else.

        ``seen`` has the names that were followed to it: one of them again closes a circle, which means no import.
        """
        home = scope.find(name)
        if home is None or (home, name) in seen:
            return {None}
        seen |= {(home, name)}
        found: set[str | None] = set()
        for binding in home.bindings[name]:
            if isinstance(binding, ast.Constant):
                continue  # except ImportError: name = None
            found |= self._dotted(binding, home, seen) if isinstance(binding, ast.expr) else {binding}
        return found or {None}

    def _dotted(self, node: ast.expr, scope: Scope, seen: frozenset[tuple[Scope, str]]) -> set[str | None]:
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return {None}
        tail = "".join(f".{name}" for name in reversed(attributes))
        return {None if root is None else root + tail for root in self.meanings(node.id, scope, seen)}

    def dotted(self, node: ast.AST) -> str:
        """Return the full name of the import that a name or attribute refers to, such as torch.cuda; "" if unknown."""
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return ""
        found = self._dotted(node, self._scopes[node], frozenset())
        return (found.pop() or "") if len(found) == 1 else ""

    def is_taken(self, name: str, imported: str = "") -> bool:
        """Return whether a scope binds or uses ``name``, except as an import of ``imported`` at the top level."""
        if any(name in scope.bindings for scope in {*self._scopes.values()} - {self.module}) or name in self.unbound():
            return True
        return any(binding != imported for binding in self.module.bindings.get(name, ()))

    def unbound(self) -> set[str]:
        """Return the names that the program uses and no scope binds."""
        names = (node for node in self.nodes if isinstance(node, ast.Name))
        return {node.id for node in names if self._scopes[node].find(node.id) is None}


def module_of(node: ast.ImportFrom) -> str:
    """Return the module that a statement imports from, as the statement writes it."""
    return "." * node.level + (node.module or "")


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the full names that a statement imports, as it writes them."""
    before = f"{module_of(node)}{'.' if node.module else ''}" if isinstance(node, ast.ImportFrom) else ""
    return [before + alias.name for alias in node.names]


def _parameters(arguments: ast.arguments) -> list[str]:
    found = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [one.arg for one in found if one is not None]


def _inside(node: ast.AST) -> set[ast.AST]:
    """Return the children of ``node`` that are evaluated in the scope that it opens."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {*node.body}
    if isinstance(node, ast.Lambda):
        return {node.body}
    return {*ast.iter_child_nodes(node)} if isinstance(node, _COMPREHENSIONS) else set()


def _of_comprehension(scope: Scope, parent: ast.AST | None) -> Scope:
    """Return the scope that stores a name: ``:=`` inside a comprehension binds in the function around it."""
    if isinstance(parent, ast.NamedExpr):
        while isinstance(scope.node, _COMPREHENSIONS) and scope.outer is not None:
            scope = scope.outer
    return scope
