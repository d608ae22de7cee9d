# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer rules: replace optimizers of torch.optim by fused optimizers with the same update rule.

Imports that are no longer used are removed. Imports that were not used before stay.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import PurePath

from apex_npu.migrate.engine.names import imported
from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.source import Edit, without
from apex_npu.migrate.engine.syntax import constant, is_told, keywords, text

from .tables import FUSED, FUSED_CHOICES, FUSED_KEYWORDS
from .targets import UNNAMED, name_of, replaced, torch_import

_OFF = ast.Constant(value=False)
_PASSED_ON = "the class is passed on or compared: replace all of its uses by the fused class by hand"


def _use(program: Program, node: ast.Name | ast.Attribute) -> None:
    """Replace a class of torch.optim where it is called, and refuse other uses except for annotations."""
    module, _, name = program.dotted(node).rpartition(".")
    known = name in FUSED and module in ("torch.optim", f"torch.optim.{name.lower()}")
    if not known or not isinstance(node.ctx, ast.Load) or _is_annotation(program, node):
        return
    call, links, optimizers = program.call_of(node), [f"class {name}"], name_of(program, "optimizers")
    if call is None:
        # Optimizers of a class that the program compares with stay.
        around = program.parent(node)
        asks = isinstance(around, ast.Call) and text(around.func) in ("isinstance", "issubclass")
        asks |= isinstance(around, (ast.Compare, ast.Tuple))
        program.refuse("O501", node, _PASSED_ON, links if asks else ())
        return
    refusal = UNNAMED if optimizers is None else _lacking(call, name)
    for one in program.every(ast.Call):
        if not refusal and constant(keywords(one).get("sparse", _OFF)) is not False:
            refusal = f"gradients are sparse (line {one.lineno}), which fused optimizers do not take"
    given: list[ast.expr | ast.keyword] = sorted([*call.args, *call.keywords], key=program.source.span)
    # foreach and fused choose between torch's implementations.
    gone = [isinstance(one, ast.keyword) and one.arg in FUSED_CHOICES and not refusal for one in given]
    edits = [replaced(program, node, f"{optimizers}.{FUSED[name][0]}")]
    edits += without(program.source, [*map(program.source.span, given)], gone) if any(gone) else []
    span = program.source.span(node)[0], max(program.source.span(node)[1], *(edit.end for edit in edits))
    program.report("O501", "changed", span if len(edits) > 1 else node, edits, links=links, refusal=refusal)


HANDLERS = {ast.Name: _use, ast.Attribute: _use}


def _is_annotation(program: Program, node: ast.AST) -> bool:
    parent = program.parent(node)
    while isinstance(parent, (ast.Subscript, ast.BinOp, ast.Tuple)):
        node, parent = parent, program.parent(parent)
    return node in (getattr(parent, "annotation", None), getattr(parent, "returns", None))


def _lacking(call: ast.Call, name: str) -> str:
    """Return why the fused optimizer cannot take the arguments of a call, or ""."""
    ours, places = FUSED[name]
    known = places.split()
    if not is_told(call):
        return "its arguments are unknown: * or **"
    unknown = [one.arg for one in call.keywords if one.arg not in {*known, *FUSED_KEYWORDS, *FUSED_CHOICES}]
    unknown += [f"number {len(known) + 1}"] if len(call.args) > len(known) else []
    return f"{ours} has no argument {unknown[0]}" if unknown else ""


_FAMILIES = ("O501", "T", "D110")


def check_imports(program: Program, path: str) -> None:
    """Remove imports that are no longer used, unless other files may import these names from the file at ``path``."""
    if not program.options.has("X203"):
        return
    edits = [edit for draft in program.changes() if draft.rule.startswith(_FAMILIES) for edit in draft.edits]
    if not edits or PurePath(path).name == "__init__.py" or "__all__" in program.names.module.bindings:
        return
    for node in program.every(ast.Import, ast.ImportFrom):
        start, end = program.source.span(node)
        edited = any(start <= draft.start < end or start < draft.end <= end for draft in program.changes())
        unused = [alias for alias in node.names if _is_unused(program, node, alias, edits)]
        if unused and not edited and node is not torch_import(program):
            _remove(program, node, unused)


def _is_unused(program: Program, node: ast.Import | ast.ImportFrom, alias: ast.alias, edits: Sequence[Edit]) -> bool:
    """Return whether ``edits`` replace all uses of a name that is imported from torch."""
    name = imported(node)[node.names.index(alias)]
    if not name.startswith("torch.") or (alias.asname is None and isinstance(node, ast.Import)):
        return False
    bound = alias.asname or alias.name
    home = program.names.scope(node).find(bound)
    if home is None or len(home.bindings[bound]) != 1:
        return False
    named = (one for one in program.every(ast.Name) if one.id == bound)
    uses = [one for one in named if program.names.scope(one).find(bound) is home]
    # Python may give wrong places inside an f-string.
    exact = not any(isinstance(at, ast.JoinedStr) for use in uses for at in program.around(use))
    starts = [program.source.span(use)[0] for use in uses]
    gone = all(any(edit.start <= start < edit.end for edit in edits) for start in starts)
    return bool(uses) and exact and gone


def _remove(program: Program, node: ast.Import | ast.ImportFrom, unused: list[ast.alias]) -> None:
    source, body = program.source, program.body_of(node)
    if len(unused) == len(node.names):
        if not program.has_own_lines(node) or len(body) < 2:
            return
        start, end = source.line_start(node.lineno), source.line_end(node.end_lineno or 0)
        end = min(end + len(source.newline(node.end_lineno or 0)), len(source.text))
        program.change("X203", Edit(start, end, ""))
        return
    spans, gone = [*map(source.span, node.names)], [alias in unused for alias in node.names]
    for edit in without(source, spans, gone):
        if "\n" not in source.text[edit.start : edit.end]:
            program.change("X203", edit)
