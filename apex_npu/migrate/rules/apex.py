# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apex rules: change imports of apex to imports of apex_npu, by the table of ``install_as_apex``."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterable
from pathlib import Path

from apex_npu.compat import MODULES
from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import root_of

_PACKAGE = Path(__file__).parents[2]


@functools.cache
def body_of(module: str) -> list[ast.stmt]:
    """Return the statements of a module of this package. They are read from its source, which is not imported."""
    path = _PACKAGE.joinpath(*module.split(".")[1:])
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    return ast.parse(file.read_text(encoding="utf-8")).body


@functools.cache
def exports(module: str) -> frozenset[str]:
    """Return the public names of a module of this package."""
    body = body_of(module)
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    names = (node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    return frozenset(name for name in names if not name.startswith("_"))


def _is_public(module: str) -> bool:
    return module in MODULES and "._" not in module


def _has(module: str, name: str) -> bool:
    """Return whether the new module of an old one has the old one's ``name`` as an attribute."""
    ours, old = MODULES[module], f"{module}.{name}"
    if module == "apex" or old not in MODULES:
        return name in exports(ours)
    # A submodule in the same place here is an attribute of its package if the package imports from it.
    imports = (node.module for node in body_of(ours) if isinstance(node, ast.ImportFrom))
    return MODULES[old] == f"{ours}.{name}" and MODULES[old] in imports


def _lacking(module: str, names: Iterable[str]) -> str | None:
    """Return the first of ``names``, each an attribute of the one before, that is private or missing in new modules.

    The first is an attribute of the old ``module``. Return None if nothing is missing.
    """
    for name in names:
        if name.startswith("__"):
            return None
        old = f"{module}.{name}"
        if name.startswith("_") or not _has(module, name):
            return old
        if old not in MODULES:
            return None
        module = old
    return None


def _place(module: str, name: str) -> tuple[str, str]:
    """Return the new module that has ``name`` of an old module, and its name there; empty strings if there is none."""
    if name == "*" or _lacking(module, [name]) is None:
        return MODULES[module], name
    old = f"{module}.{name}"
    package, _, last = (MODULES[old] if _is_public(old) else "").rpartition(".")
    return package, last


def _refuse(program: Program, node: ast.expr | ast.stmt | ast.alias, name: str, links: list[str]) -> None:
    module, _, last = name.rpartition(".")
    served = name in MODULES or (module in MODULES and last.startswith("_"))
    more = "python -m apex_npu run serves it under its old name" if served else "only NVIDIA's Apex has it"
    program.refuse("X250", node, f"{name} is not a public name of apex_npu: {more}", links)


def _is_apex(module: str) -> bool:
    return f"{module}.".startswith("apex.") or module in MODULES


def _import(program: Program, node: ast.Import) -> None:
    for alias in node.names:
        if not _is_apex(alias.name):
            continue
        (top, *below), span = alias.name.split("."), program.source.span(alias)
        links = [f"name {alias.asname or top}"]
        # Without "as", the statement binds the package, which has only some modules as attributes.
        if not _is_public(alias.name) or (not alias.asname and (len(below) > 1 or _lacking(top, below))):
            _refuse(program, alias, alias.name, links)
            continue
        # apex_C and change_data_ptr are top-level modules; the others are attributes of the package.
        ours = MODULES[alias.name] if alias.asname or top != "apex" else "apex_npu"
        program.report("X201", "changed", span, [Edit(*span, f"{ours} as {alias.asname or top}")], links=links)


def _import_from(program: Program, node: ast.ImportFrom) -> None:
    module = node.module or ""
    if node.level or not _is_apex(module):
        return
    links = [f"name {alias.asname or alias.name}" for alias in node.names]
    if not _is_public(module):
        return _refuse(program, node, module, links)
    places = {alias.name: _place(module, alias.name) for alias in node.names}
    missing = [name for name, (package, _) in places.items() if not package]
    if "*" in places:
        known = {name for name in exports(MODULES[module]) if not _lacking(module, [name])}
        missing = sorted(program.names.unbound() - known - set(dir(builtins)) - {"__file__", "__path__"})
    if missing:
        return _refuse(program, node, f"{module}.{missing[0]}", links)
    packages = {package for package, _ in places.values()}
    if len(packages) > 1:
        return _import_apart(program, node, places, links)
    edits = [program.rename_module(node, packages.pop())]
    for alias in node.names:
        name = places[alias.name][1]
        if name != alias.name:
            edits.append(Edit(*program.source.span(alias), f"{name} as {alias.asname or alias.name}"))
    program.report("X201", "changed", node, edits, links=links)


def _import_apart(program: Program, node: ast.ImportFrom, places: dict[str, tuple[str, str]], links: list[str]) -> None:
    """Import names from several modules, by a statement for each."""
    names: dict[str, list[str]] = {}
    for alias in node.names:
        (package, name), bound = places[alias.name], alias.asname or alias.name
        names.setdefault(package, []).append(name if name == bound else f"{name} as {bound}")
    statements = [f"from {package} import {', '.join(listed)}" for package, listed in names.items()]
    newline = program.source.newline(node.lineno) + program.source.indent(node)
    edit = Edit(*program.source.span(node), (newline if program.has_own_lines(node) else "; ").join(statements))
    several = "\n" in program.source.text[edit.start : edit.end]
    apart = "apex_npu has these names in several modules: import each in a statement of its own"
    program.report("X201", "changed", node, [edit], links=links, refusal=apart if several else "")


def _use(program: Program, node: ast.Attribute) -> None:
    """Refuse an attribute of an imported module that apex_npu lacks, and with it the import."""
    dotted = program.dotted(node)
    if not dotted.startswith("apex.") or isinstance(program.parent(node), ast.Attribute):
        return
    root = root_of(node)
    imported = program.dotted(root)
    if isinstance(root, ast.Name) and imported in MODULES:
        missing = _lacking(imported, dotted.removeprefix(f"{imported}.").split("."))
        if missing is not None:
            _refuse(program, node, missing, [f"name {root.id}"])


HANDLERS = {ast.Import: _import, ast.ImportFrom: _import_from, ast.Attribute: _use}
