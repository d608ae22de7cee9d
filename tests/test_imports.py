# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Imports go one way: no module imports itself through others, not even inside a function or for types alone."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "apex_npu"

Imports = dict[str, set[str]]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node: ast.AST, package: str, modules: set[str]) -> set[str]:
    """The modules of apex_npu that a statement in ``package`` imports: names that are modules, or their modules."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & modules
    if not isinstance(node, ast.ImportFrom):
        return set()
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    source = ".".join([*above, *([node.module] if node.module else [])])
    names = {f"{source}.{alias.name}" for alias in node.names}
    return names & modules | ({source} & modules if names - modules else set())


@functools.cache
def imports_of_package() -> Imports:
    files = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    compiled = "apex_npu._C"  # has no source here
    graph: Imports = {compiled: set()}
    for name, path in sorted(files.items()):
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = (
            imported(node, package, {*files, compiled})
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
        graph[name] = set().union(*found) - {name}
    return graph


def reachable(graph: Imports, start: str) -> set[str]:
    """The modules that ``start`` imports, directly or through others."""
    found: set[str] = set()
    todo = [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo.extend(new)
    return found


def cycles_of(graph: Imports) -> list[list[str]]:
    """The groups of modules that import each other."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return sorted(list(group) for group in groups if group)


def test_a_cycle_is_found():
    graph: Imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"a"}}
    assert cycles_of(graph) == [["a", "b", "c"]]
    assert cycles_of({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_all_kinds_of_imports_count():
    source = """
import m.a
from m import b
from . import c
from ..other import thing
def late():
    from m.d import name
if TYPE_CHECKING:
    from m.sub import e, Name
"""
    modules = {"m", "m.a", "m.b", "m.sub", "m.sub.c", "m.sub.e", "m.d", "m.other"}
    found = [imported(node, "m.sub", modules) for node in ast.walk(ast.parse(source))]
    assert set().union(*found) == {"m.a", "m.b", "m.sub.c", "m.other", "m.d", "m.sub.e", "m.sub"}


def test_no_module_imports_itself_through_others():
    assert cycles_of(imports_of_package()) == []
