# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer rules: optimizers of torch.optim become fused ones of the same rule."""

from __future__ import annotations

import ast

from apex_npu.migrate.engine.program import Program

from .catalogue import RULES
from .ours import UNNAMED, name_of
from .tables import FUSED, FUSED_KEYWORDS
from .targets import replaced


def check(program: Program) -> None:
    """Say what the rules for optimizers find."""
    if not program.options.has("O501"):
        return
    uses = [node for node in program.names.nodes if isinstance(node, (ast.Attribute, ast.Name))]
    found = [(node, name) for node in uses if (name := _optimizer(program, node)) and not _is_annotation(program, node)]
    if not found:
        return
    calls = (node for node in program.names.nodes if isinstance(node, ast.Call))
    sparse = next((program.source.span(call)[0] for call in calls if _is_sparse(call)), None)
    optimizers = name_of(program, "optimizers")
    for node, name in found:
        _use(program, node, name, optimizers, sparse)


def _optimizer(program: Program, node: ast.Attribute | ast.Name) -> str:
    """The class of torch.optim that is used, if we have one of its rule."""
    parts = (program.names.dotted(node) or "").split(".") if isinstance(node.ctx, ast.Load) else [""]
    modules = [["torch", "optim"], ["torch", "optim", parts[-1].lower()]]
    return parts[-1] if parts[-1] in FUSED and parts[:-1] in modules else ""


def _is_sparse(node: ast.Call) -> bool:
    """Whether gradients that only some rules can take are made here."""
    given = [keyword.value for keyword in node.keywords if keyword.arg == "sparse"]
    return any(not (isinstance(value, ast.Constant) and value.value is False) for value in given)


def _is_annotation(program: Program, node: ast.AST) -> bool:
    parent = program.parent(node)
    while isinstance(parent, (ast.Subscript, ast.BinOp, ast.Tuple)):
        node, parent = parent, program.parent(parent)
    return node in (getattr(parent, "annotation", None), getattr(parent, "returns", None))


def _use(program: Program, node: ast.expr, name: str, optimizers: str | None, sparse: int | None) -> None:
    call, links = program.parent(node), [f"class {name}"]
    if not isinstance(call, ast.Call) or call.func is not node:
        program.report("O501", "refused", node, message=RULES["O501"].message, links=links if _asks(call) else ())
        return
    refusal = UNNAMED if optimizers is None else _lacking(call, name)
    if sparse is not None:
        refusal = f"gradients are sparse (line {program.source.place(sparse)[0]}), which fused optimizers do not take"
    edit = replaced(program, node, f"{optimizers}.{FUSED[name][0]}")
    program.report("O501", "refused" if refusal else "changed", node, [] if refusal else [edit], refusal, links)


def _asks(parent: ast.AST | None) -> bool:
    """Whether a class is asked for, as in ``isinstance``: what is made has to stay of this class."""
    return isinstance(parent, (ast.Compare, ast.Tuple)) or (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Name)
        and parent.func.id in ("isinstance", "issubclass")
    )


def _lacking(call: ast.Call, name: str) -> str:
    """Why a call cannot be one of ours: what it passes that ours does not take."""
    ours, places = FUSED[name]
    known = places.split()
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        return "its arguments cannot be told: * or **"
    unknown = [one.arg for one in call.keywords if one.arg not in {*known, *FUSED_KEYWORDS}]
    unknown += [f"number {len(known) + 1}"] if len(call.args) > len(known) else []
    return f"{ours} has no argument {unknown[0]}" if unknown else ""
