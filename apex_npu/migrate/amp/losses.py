# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules for losses and checkpoints under amp: backward, clipping, losses that reject half precision, states."""

from __future__ import annotations

import ast

from apex_npu.migrate.engine.program import Program, UnclearError
from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import argument, method_of, text
from apex_npu.migrate.rules.targets import replaced

from .training import MOVES, Backward, Training

_NOT_SAVED = "amp.state_dict() is not saved with it: resumed training starts with the initial loss scale"
_NOT_LOADED = "amp.load_state_dict() is not called with it: training starts with the initial loss scale"


def scale(put: Training, backward: Backward) -> None:
    """Put a block of ``scale_loss`` around a backward."""
    program, source, call, statement = put.program, put.source, backward.call, backward.statement
    assert isinstance(call.func, ast.Attribute)
    loss, rule = call.func.value, "A302"
    if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale":
        if text(loss.func.value) not in put.torch_amp.scalers or len(loss.args) != 1 or loss.keywords:
            raise UnclearError(call, "A355", "the scaler is not made in this file")
        loss, rule = loss.args[0], "T402"
    if put.torch_amp.holds(statement):
        raise UnclearError(call, "A355", "backward is inside of autocast: put it after the block")
    optimizers = put.stepped_by(backward)
    (start, _), (first, last) = source.span(statement), source.span(loss)
    dot = program.method_span(call.func)[0]
    if "\n" in source.text[last:dot] or "\n" in source.text[start:first]:
        raise UnclearError(call, "A353", "the statement is on several lines: write it on one")
    scaled = "scaled_loss"
    while program.names.is_taken(scaled):
        scaled = f"amp_{scaled}"
    rest = program.put_into(statement, f", {optimizers}) as {scaled}:") + scaled
    edits = [Edit(start, first, f"with {put.amp}.scale_loss("), Edit(last, dot, rest)]
    program.report(rule, "changed", (start, dot), edits)


def clip(put: Training, call: ast.Call) -> None:
    """Let the program clip the gradients of ``amp.master_params``."""
    lists = argument(call, 0, "parameters")
    model, method = method_of(lists) if isinstance(lists, ast.Call) else ("", "")
    here, at = put.program.function_of(call), put.offset(call)
    steps = [one for one in put.backwards if put.program.function_of(one.call) is here]
    steps = [one for one in steps if put.offset(one.call) < at]
    optimizer = put.stepped_by(steps[-1]) if steps else ""
    made = [one for one in put.made if one.target == optimizer and put.is_same(one, call)]
    passed = put.program.is_argument(call, optimizer) and put.program.is_argument(call, model)
    whole = any(one.parts == (model,) for one in made) or (not made and passed)
    if lists is not None and model and method == "parameters" and whole:
        edit = replaced(put.program, lists, f"{put.amp}.master_params({optimizer})")
        put.program.report("A303", "changed", lists, [edit])
    elif put.casts_model:
        raise UnclearError(call, "A354", "the optimizer is unclear: clip the gradients of amp.master_params(optimizer)")


def float_inputs(put: Training, call: ast.Call) -> None:
    """Cast the input of each call of a BCELoss to float32. BCELoss rejects half precision."""
    program, at = put.program, _user(put.program, call)
    if isinstance(at, ast.Call):
        float_input(put, at)
        return
    target = text(at.targets[0]) if isinstance(at, ast.Assign) else ""
    home, calls = put.scope_of(call, target), []
    for node in program.every(ast.Name, ast.Attribute) if target else ():
        if text(node) != target or not ("." in target or put.scope_of(node, target) is home):
            continue
        parent, called = program.parent(node), program.call_of(node)
        if called is not None:
            calls.append(called)
        elif isinstance(node.ctx, ast.Load) and not (isinstance(parent, ast.Attribute) and parent.attr in MOVES):
            raise UnclearError(node, "A354", "a BCELoss is passed on, so its calls are unknown")
    if not calls:
        raise UnclearError(call, "A354", "the calls of this BCELoss are unknown")
    for one in calls:
        float_input(put, one)


def float_input(put: Training, call: ast.Call) -> None:
    """Cast the input of ``binary_cross_entropy`` to float32 at levels where it may be half precision."""
    if put.casts_model:
        return  # outputs of the model are float32
    if not call.args or isinstance(call.args[0], ast.Starred):
        raise UnclearError(call, "A354", "the input of binary_cross_entropy is unclear: pass it as the first argument")
    given = call.args[0]
    start, end = put.source.span(given)
    done = any(draft.rule == "A306" and draft.start == start for draft in put.program.drafts)
    simple = isinstance(given, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    if done or put.source.text[start:end].endswith(".float()"):
        return
    edits = [] if simple else [Edit(start, start, "(")]
    edits.append(Edit(end, end, ".float()" if simple else ").float()"))
    put.program.report("A306", "changed", (start, end), edits)


def _user(program: Program, call: ast.Call) -> ast.AST | None:
    """Return the node around the call that makes a module, without ``.to(device)`` and the like."""
    at: ast.AST = call
    parent = program.parent(at)
    while isinstance(parent, ast.Attribute) and parent.attr in MOVES:
        at = program.parent(parent) or parent
        parent = program.parent(at)
    return parent if not isinstance(parent, ast.Call) or parent.func is at else None


def put_checkpoints(put: Training) -> None:
    """Save and load the state of amp beside that of each optimizer, unless it replaces that of a GradScaler."""
    if put.torch_amp.scalers:
        return
    done: set[object] = set()
    optimizers = put.targets | put.cleared
    for call in sorted(put.calls, key=put.offset, reverse=True):
        owner, method = method_of(call)
        if owner in optimizers and method == "state_dict":
            parent = put.program.parent(call)
            if not isinstance(parent, ast.Dict) or parent not in done:
                _save(put, call, parent)
            done.add(parent)
        elif owner in optimizers and method == "load_state_dict":
            given = call.args[0] if call.args else None
            statement = put.program.parent(call)
            file = text(given.value) if isinstance(given, ast.Subscript) else ""
            if isinstance(statement, ast.Expr) and put.program.has_own_lines(statement) and file:
                body = (id(put.program.body_of(statement)), file)
                if body not in done:
                    load = f'    {put.amp}.load_state_dict({file}["amp"])'
                    put.put_after("A305", statement, [f'if "amp" in {file}:', load])
                done.add(body)
            else:
                put.program.note("A305", call, _NOT_LOADED)


def _save(put: Training, call: ast.Call, parent: ast.AST | None) -> None:
    """Save ``amp.state_dict()`` beside the state of an optimizer."""
    keys = parent.keys if isinstance(parent, ast.Dict) else []
    if isinstance(parent, ast.Dict) and all(isinstance(key, ast.Constant) and key.value != "amp" for key in keys):
        at = parent.values.index(call)
        (key, _), (_, end) = put.source.span(parent.keys[at] or call), put.source.span(call)
        line = put.source.line_start(put.source.place(key)[0])
        indent = put.source.text[line:key]
        space = " " if indent.strip() else put.source.newline(put.source.place(key)[0]) + indent
        edit = Edit(end, end, f',{space}"amp": {put.amp}.state_dict()')
        put.program.report("A304", "changed", (end, end), [edit])
    elif (
        isinstance(parent, ast.Assign)
        and isinstance(parent.targets[0], ast.Subscript)
        and put.program.has_own_lines(parent)
    ):
        file = text(parent.targets[0].value)
        if file:
            put.put_after("A304", parent, [f'{file}["amp"] = {put.amp}.state_dict()'])
    else:
        put.program.note("A304", call, _NOT_SAVED)
