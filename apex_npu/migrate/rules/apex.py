# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apex rules: change imports of apex to imports of apex_npu, by the table of ``install_as_apex``."""

from __future__ import annotations

import ast
import builtins
import functools
from pathlib import Path

from apex_npu.compat import MODULES
from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import root_of

_PACKAGE = Path(__file__).parents[2]


@functools.cache
def exports(module: str) -> frozenset[str]:
    """Return the public names of a module of this package. They are read from its source, which is not imported."""
    path = _PACKAGE.joinpath(*module.split(".")[1:])
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    names = (node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    return frozenset(name for name in names if not name.startswith("_"))


def _top_names() -> frozenset[str]:
    """Return the names that ``import apex_npu as apex`` gives as ``apex.name``. Others are in another place here."""
    return exports("apex_npu") | {"apex", "apex_C", "change_data_ptr"}


def _lacking(name: str) -> str | None:
    """Return the part of a dotted apex name that is missing here or private; None if all of it exists."""
    parts = name.split(".")
    for count, part in enumerate(parts, 1):
        start = ".".join(parts[:count])
        if part.startswith("__"):
            return None
        if part.startswith("_"):
            return start
        if start not in MODULES:
            return None if part in exports(MODULES[".".join(parts[: count - 1])]) else start
    return None


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
        parts, span = alias.name.split("."), program.source.span(alias)
        links = [f"name {alias.asname or parts[0]}"]
        missing = _lacking(alias.name)
        if missing is not None or (alias.asname is None and (len(parts) > 2 or parts[-1] not in _top_names())):
            _refuse(program, alias, missing or alias.name, links)
            continue
        # apex_C and change_data_ptr are top-level modules; the others are attributes of the package.
        ours = MODULES[alias.name] if alias.asname or parts[0] != "apex" else "apex_npu"
        program.report("X201", "changed", span, [Edit(*span, f"{ours} as {alias.asname or parts[0]}")], links=links)


def _import_from(program: Program, node: ast.ImportFrom) -> None:
    module = node.module or ""
    if node.level or not _is_apex(module):
        return
    links = [f"name {alias.asname or alias.name}" for alias in node.names]
    star = any(alias.name == "*" for alias in node.names)
    names = [module] if star else [f"{module}.{alias.name}" for alias in node.names]
    missing = [found for found in map(_lacking, names) if found is not None]
    if module == "apex":
        missing += [f"apex.{alias.name}" for alias in node.names if alias.name not in _top_names()]
    if star and not missing:
        unknown = program.names.unbound() - exports(MODULES[module]) - set(dir(builtins)) - {"__file__", "__path__"}
        missing += [f"{module}.{name}" for name in sorted(unknown)]
    if missing:
        _refuse(program, node, missing[0], links)
    else:
        program.report("X201", "changed", node, [program.rename_module(node, MODULES[module])], links=links)


def _use(program: Program, node: ast.Attribute) -> None:
    """Refuse an attribute of an imported module that apex_npu lacks, and with it the import."""
    dotted = program.dotted(node)
    if not dotted.startswith("apex.") or isinstance(program.parent(node), ast.Attribute):
        return
    root = root_of(node)
    imported, top = program.dotted(root), dotted.split(".")[1]
    missing = _lacking(dotted)
    if missing is None and imported == "apex" and top not in _top_names():
        missing = f"apex.{top}"
    if missing is not None and isinstance(root, ast.Name) and imported in MODULES:
        _refuse(program, node, missing, [f"name {root.id}"])


HANDLERS = {ast.Import: _import, ast.ImportFrom: _import_from, ast.Attribute: _use}
