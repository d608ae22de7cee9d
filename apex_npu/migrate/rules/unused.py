# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Imports that rules have left without a use are removed; those that had none before stay."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import PurePath

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import alone, around, body_of

from .ours import torch_import

_FAMILIES = ("O501", "T", "D110")


def check(program: Program, path: str) -> None:
    """Remove them from a file that other files do not import names through."""
    if not program.options.has("X203"):
        return
    edits = [edit for draft in program.changes() if draft.rule.startswith(_FAMILIES) for edit in draft.edits]
    if not edits or PurePath(path).name == "__init__.py" or "__all__" in program.names.module.bindings:
        return
    for node in program.names.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node is not torch_import(program):
            unused = [alias for alias in node.names if _is_unused(program, node, alias, edits)]
            if unused and not _is_edited(program, node):
                _remove(program, node, unused)


def _is_unused(program: Program, node: ast.Import | ast.ImportFrom, alias: ast.alias, edits: Sequence[Edit]) -> bool:
    """Whether all uses of a name of torch's are in what is replaced."""
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
    if not f"{module}{alias.name}".startswith("torch.") or (alias.asname is None and isinstance(node, ast.Import)):
        return False
    bound = alias.asname or alias.name
    home = program.names.scope(node).find(bound)
    if home is None or len(home.bindings[bound]) != 1:
        return False
    uses = [
        one
        for one in program.names.nodes
        if isinstance(one, ast.Name) and one.id == bound and program.names.scope(one).find(bound) is home
    ]
    # Places inside of an f-string may be wrong.
    exact = not any(isinstance(at, ast.JoinedStr) for use in uses for at in around(program, use))
    starts = [program.source.span(use)[0] for use in uses]
    gone = all(any(edit.start <= start < edit.end for edit in edits) for start in starts)
    return bool(uses) and exact and gone


def _is_edited(program: Program, node: ast.stmt) -> bool:
    start, end = program.source.span(node)
    return any(start <= draft.start < end or start < draft.end <= end for draft in program.changes())


def _remove(program: Program, node: ast.Import | ast.ImportFrom, unused: list[ast.alias]) -> None:
    source, body = program.source, body_of(program, node)
    if len(unused) == len(node.names):
        if not alone(program, node) or len(body) < 2:
            return
        start, end = source.line_start(node.lineno), source.line_end(node.end_lineno or 0)
        end = min(end + len(source.newline(node.end_lineno or 0)), len(source.text))
        edit = Edit(start, end, "")
        program.report("X203", "changed", (start, end), [edit])
        return
    kept = [number for number, alias in enumerate(node.names) if alias not in unused]
    runs = [[alias] for alias in unused if node.names.index(alias) < kept[-1]]
    runs += [node.names[kept[-1] + 1 :]] if kept[-1] + 1 < len(node.names) else []
    for run in runs:
        at = node.names.index(run[0])
        start, end = source.span(run[0])[0], source.span(run[-1])[1]
        if at < kept[-1]:
            end = source.span(node.names[at + 1])[0]
        else:
            start = source.span(node.names[at - 1])[1]
        if "\n" not in source.text[start:end]:
            edit = Edit(start, end, "")
            program.report("X203", "changed", (start, end), [edit])
