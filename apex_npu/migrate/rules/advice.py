# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Advice (``--select N``): what may be faster on npu, and alters data or results. It is never applied."""

from __future__ import annotations

import ast

from apex_npu.migrate.engine.program import Program

from .catalogue import RULES

_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_INT64 = ("torch.int64", "torch.long")


def check(program: Program) -> None:
    """Say what could be different."""
    if not any(program.options.has(rule) for rule in ("N701", "N702", "N703", "N704")):
        return
    for node in program.names.nodes:
        dotted = program.names.dotted(node) if isinstance(node, (ast.Name, ast.Attribute)) else None
        if isinstance(node, ast.Call):
            _call(program, node)
        elif dotted in _INT64:
            assert isinstance(node, ast.expr)
            program.report("N703", "note", node, message=RULES["N703"].message)
        elif dotted == "torch.channels_last":
            assert isinstance(node, ast.expr)
            program.report("N704", "note", node, message=RULES["N704"].message)


def _call(program: Program, call: ast.Call) -> None:
    if program.names.dotted(call.func) in _LOADERS:
        given = {one.arg: one.value for one in call.keywords}
        if "pin_memory" in given and not _is_false(given["pin_memory"]):
            program.report("N701", "note", given["pin_memory"], message=RULES["N701"].message)
        if None not in given and ("drop_last" not in given or _is_false(given["drop_last"])):
            program.report("N702", "note", call, message=RULES["N702"].message)
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "long" and not call.args:
        program.report("N703", "note", program.method_span(call.func), message=RULES["N703"].message)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value
