# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules for checkpoints under amp."""

from __future__ import annotations

import ast

from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import alone, body_of, method_of, text
from apex_npu.migrate.rules.catalogue import RULES

from .insertion import Insertion


def put_checkpoints(put: Insertion) -> None:
    """Save and load the state of amp beside that of each optimizer."""
    training = put.training
    done: set[object] = set()
    optimizers = training.targets | training.cleared
    for call in sorted(training.calls, key=training.offset, reverse=True):
        owner, method = method_of(call)
        if owner in optimizers and method == "state_dict":
            parent = put.program.parent(call)
            if not isinstance(parent, ast.Dict) or parent not in done:
                _save(put, call, parent)
            done.add(parent)
        elif owner in optimizers and method == "load_state_dict" and not put.torch_amp.scalers:
            given = call.args[0] if call.args else None
            statement = put.program.parent(call)
            file = text(given.value) if isinstance(given, ast.Subscript) else ""
            if isinstance(statement, ast.Expr) and alone(put.program, statement) and file:
                body = (id(body_of(put.program, statement)), file)
                if body not in done:
                    load = f'    {put.amp}.load_state_dict({file}["amp"])'
                    put.put_after("A305", statement, [f'if "amp" in {file}:', load])
                done.add(body)
            else:
                put.program.report("A305", "note", call, message=RULES["A305"].message)


def _save(put: Insertion, call: ast.Call, parent: ast.AST | None) -> None:
    """``amp.state_dict()`` beside that of an optimizer; a GradScaler's has become it."""
    if put.torch_amp.scalers:
        return
    if isinstance(parent, ast.Dict) and all(
        isinstance(key, ast.Constant) and key.value != "amp" for key in parent.keys
    ):
        at = parent.values.index(call)
        (key, _), (_, end) = put.source.span(parent.keys[at] or call), put.source.span(call)
        line = put.source.line_start(put.source.place(key)[0])
        indent = put.source.text[line:key]
        space = " " if indent.strip() else put.source.newline(put.source.place(key)[0]) + indent
        edit = Edit(end, end, f',{space}"amp": {put.amp}.state_dict()')
        put.program.report("A304", "changed", (end, end), [edit], links=["amp"])
    elif isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Subscript) and alone(put.program, parent):
        file = text(parent.targets[0].value)
        if file:
            put.put_after("A304", parent, [f'{file}["amp"] = {put.amp}.state_dict()'])
    else:
        put.program.report("A304", "note", call, message=RULES["A304"].message)
