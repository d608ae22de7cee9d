# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apex rules: imports of apex become imports of apex_npu, by the table that ``install_as_apex`` serves."""

from __future__ import annotations

import ast
import builtins
import functools
from pathlib import Path

from apex_npu.compat import MODULES
from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.source import Edit

from .catalogue import RULES

_RUN = "python -m apex_npu run serves it under its old name"
_UPSTREAM = "it exists in NVIDIA's Apex alone"
_PACKAGE = Path(__file__).parents[2]


def check(program: Program) -> None:
    """Say what the rules for apex find."""
    for node in program.names.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "apex" or alias.name.startswith("apex.") or alias.name in MODULES:
                    _import(program, alias)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module == "apex" or module.startswith("apex.") or module in MODULES:
                _import_from(program, node, module)
        elif isinstance(node, ast.Attribute) and not isinstance(program.parent(node), ast.Attribute):
            _use(program, node)


@functools.cache
def exports(module: str) -> frozenset[str]:
    """The public names of a module of ours, read from its source: nothing is imported."""
    path = _PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign)
            return frozenset(ast.literal_eval(node.value))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return frozenset(name for name in names if not name.startswith("_"))


def lacking(name: str) -> str | None:
    """Of a dotted name of apex's, the part that we do not have or that is private; None where all is there."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        start = ".".join(parts[:count])
        if parts[count - 1].startswith("__"):
            return None
        if parts[count - 1].startswith("_"):
            return start
        if start in MODULES:
            continue
        known = exports(MODULES[".".join(parts[: count - 1])])
        return None if parts[count - 1] in known else start
    return None


def _refuse(program: Program, node: ast.expr | ast.stmt | ast.alias, name: str, links: list[str]) -> None:
    served = name in MODULES or (name.rpartition(".")[0] in MODULES and name.rpartition(".")[2].startswith("_"))
    message = f"{RULES['X250'].message.format(name)}: {_RUN if served else _UPSTREAM}"
    program.report("X250", "refused", node, message=message, links=links)


def _import(program: Program, alias: ast.alias) -> None:
    bound = alias.asname or alias.name.partition(".")[0]
    links = [f"name {bound}"]
    missing = lacking(alias.name) if alias.name.partition(".")[0] in MODULES else alias.name
    parts = alias.name.split(".")
    if missing is not None or (alias.asname is None and (len(parts) > 2 or parts[-1] not in _top_names())):
        _refuse(program, alias, missing or alias.name, links)
        return
    ours = MODULES[alias.name] if alias.asname else "apex_npu"
    name = bound if alias.asname or ours != bound else None
    span = program.source.span(alias)
    if alias.asname is None and parts[0] != "apex":
        ours = MODULES[alias.name]  # apex_C and change_data_ptr, top-level modules of their own
    edit = Edit(*span, ours if name is None else f"{ours} as {name}")
    program.report("X201", "changed", span, [edit], links=links)


def _top_names() -> frozenset[str]:
    """What ``import apex_npu as apex`` gives as ``apex.name``."""
    return exports("apex_npu") | {"apex", "apex_C", "change_data_ptr"}


def _import_from(program: Program, node: ast.ImportFrom, module: str) -> None:
    links = [f"name {alias.asname or alias.name}" for alias in node.names]
    star = any(alias.name == "*" for alias in node.names)
    names = [module] if star else [f"{module}.{alias.name}" for alias in node.names]
    missing = next((found for found in map(lacking, names) if found), None)
    if module == "apex" and missing is None:
        # `from apex import contrib`: a module that apex_npu has elsewhere.
        missing = next((f"apex.{alias.name}" for alias in node.names if alias.name not in _top_names()), None)
    if missing is None and star:
        ours = exports(MODULES[module])
        unknown = program.names.unbound() - ours - set(dir(builtins)) - {"__file__", "__path__"}
        missing = f"{module}.{min(unknown)}" if unknown else None
    if missing is not None:
        _refuse(program, node, missing, links)
        return
    program.report("X201", "changed", node, [program.rename_module(node, MODULES[module])], links=links)


def _use(program: Program, node: ast.Attribute) -> None:
    """What is used of a module that was imported: where we do not have it, the import stays, too."""
    dotted = program.names.dotted(node) or ""
    if not dotted.startswith("apex."):
        return
    root: ast.expr = node
    while isinstance(root, ast.Attribute):
        root = root.value
    imported = program.names.dotted(root) or ""
    missing = lacking(dotted)
    top = dotted.split(".")[1]
    if missing is None and imported == "apex" and top not in _top_names():
        missing = f"apex.{top}"
    if missing is not None and isinstance(root, ast.Name) and imported in MODULES:
        _refuse(program, node, missing, [f"name {root.id}"])
