# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How a program names parts of apex_npu that rules put in, and the line that imports them."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .names import module_of
from .program import Program

UNNAMED = "torch is not imported at the top level, where apex_npu would be imported, or the name apex_npu is taken"


def torch_import(program: Program) -> ast.stmt | None:
    """The first import of torch at the top level, also by way of another file; for portable code one of the name."""
    portable = program.options.to == "portable"
    for node in program.tree.body:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules += [node.module or ""] if not node.level and not portable else []
            exported = program.options.exports.get(module_of(node), {})
            star = node.names[0].name == "*"
            modules += [
                exported[name] for name in (exported if star else (one.name for one in node.names)) if name in exported
            ]
        if any((module if portable else module.partition(".")[0]) == "torch" for module in modules):
            return node
    return None


def name_of(program: Program, part: str) -> str | None:
    """``part`` of apex_npu as the program can write it; None where it cannot be imported."""
    if torch_import(program) is None:
        return None
    if not program.names.is_taken(part, f"apex_npu.{part}"):
        return part
    return None if program.names.is_taken("apex_npu", "apex_npu") else f"apex_npu.{part}"


def missing_imports(program: Program, parts: Iterable[str]) -> list[str]:
    """The statements that import ``parts``, as ``name_of`` writes them."""
    bound = program.names.module.bindings
    written = {part: name_of(program, part) for part in parts}
    plain = [part for part, name in written.items() if name == part and part not in bound]
    lines = [f"from apex_npu import {', '.join(plain)}"] if plain else []
    if any(name != part for part, name in written.items()) and "apex_npu" not in bound:
        lines.append("import apex_npu")
    return lines
