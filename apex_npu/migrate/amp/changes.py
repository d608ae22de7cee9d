# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The changes that add amp: ``initialize``, backward, clipping, losses that reject half precision, and checkpoints."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from apex_npu.migrate.engine.program import PARALLEL, Program, UnclearError
from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import argument, method_of, text
from apex_npu.migrate.rules.targets import replaced, torch_name

from .training import MOVES, Backward, Made, Training

# The arguments of ``amp.initialize`` that make processes average their gradients; ``{}`` is the name of torch.
COMBINE = "combine_grad=True, combine_ddp={}.distributed.is_initialized()"
_WRAPPER = re.compile(r"(torch|apex|apex_npu)\..*(DistributedDataParallel|DataParallel)|torch\.compile")
_NOT_SAVED = "amp.state_dict() is not saved with it: resumed training starts with the initial loss scale"
_NOT_LOADED = "amp.load_state_dict() is not called with it: training starts with the initial loss scale"


def put_initialize(put: Training) -> None:
    """Insert the call of ``amp.initialize`` for all models and optimizers of the file."""
    program, place = put.program, place_of(put)
    made: dict[str, Made] = {one.target: one for one in put.made}
    models = list(dict.fromkeys(model for one in made.values() for model in one.models))
    wrapped = [model for model in models if _is_wrapped(put, model, place)]
    check_moves(put, models, place)
    _check_loaded(put, place)
    names = [*models, *made]
    home = put.scope_of(place, names[0])
    local = all(program.names.scope(place) is put.scope_of(place, name) for name in names if "." not in name)
    assigned = f"{_listed(models)}, {_listed([*made])} = " if home is not None and local and not wrapped else ""
    models = [f'getattr({model}, "module", {model})' if model in wrapped else model for model in models]
    options = [f'opt_level="{put.level}"', *([program.options.amp_args] if program.options.amp_args else [])]
    if put.combines:
        options.append(COMBINE.format(torch_name(program)))
    links = [PARALLEL] if put.combines else []
    if put.torch_amp.switch is not None:
        _check_bound(put, place, put.torch_amp.switch)
        enabled, others = put.torch_amp.moved()
        options.append(f"enabled={enabled}")
        links += others
    call = f"{assigned}{put.amp}.initialize({_listed(models)}, {_listed([*made])}, {', '.join(options)})"
    put.put_after("A301", place, [call], links)


def place_of(put: Training) -> ast.stmt:
    """Return the statement that ``initialize`` follows: the last optimizer's, or the ``if`` that picks an optimizer."""
    made, program = sorted(put.made, key=lambda one: put.offset(one.call)), put.program
    last = made[-1].statement
    bodies = {id(program.body_of(one.statement)) for one in made}
    targets = {one.target for one in made}
    if len(bodies) == 1 and len(targets) == len(made):
        return last
    choices = [[at for at in program.around(one.statement) if isinstance(at, ast.If)] for one in made]
    common = next((at for at in choices[0] if all(at in others for others in choices)), None)
    functions = {program.function_of(one.statement) for one in made}
    bound = put.scope_of(last, made[-1].target)
    if bound is not None and any(isinstance(one, ast.Constant) for one in bound.bindings.get(made[-1].target, ())):
        raise UnclearError(last, "A351", f"{made[-1].target} may be None where amp.initialize is called")
    alike = len(targets) == len({one.models for one in made}) == len(functions) == 1
    if common is None or len(bodies) < len(made) or not alike:
        raise UnclearError(last, "A351", "optimizers are made in several places: make them in one")
    parent = program.parent(common)
    while isinstance(parent, ast.If) and parent.orelse == [common]:
        if not put.source.text.startswith("elif", put.source.span(common)[0]):
            break
        common, parent = parent, program.parent(parent)
    return common


def _check_bound(put: Training, place: ast.stmt, switch: ast.expr) -> None:
    """Refuse if the names in ``enabled`` have no value yet where ``initialize`` is called."""
    for name in {node.id for node in ast.walk(switch) if isinstance(node, ast.Name)}:
        home = put.program.names.scope(place).find(name)
        stored = [one for one in put.program.every(ast.Name) if one.id == name and not isinstance(one.ctx, ast.Load)]
        ours = [node for node in stored if put.program.names.scope(node) is home]
        late = any(put.offset(node) > put.offset(place) for node in ours)
        if home is None or (late and home is put.program.names.scope(place)):
            raise UnclearError(place, "A355", f"{put.torch_amp.enabled} has no value yet where the optimizer is made")


def _is_wrapped(put: Training, model: str, place: ast.stmt) -> bool:
    """Return whether a model may be wrapped in DistributedDataParallel at ``place``."""
    wraps = []
    for node in put.program.every(ast.Assign):
        if model in map(text, node.targets):
            value = node.value
            while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in MOVES:
                value = value.func.value
            name = put.program.dotted(value.func) if isinstance(value, ast.Call) else ""
            before = put.offset(node) < put.offset(place) or "." in model
            wraps += [(node, name)] if _WRAPPER.fullmatch(name) and before else []
    for node, name in wraps:
        if put.casts_model or name == "torch.compile":
            raise UnclearError(node, "A352", f"{model} is wrapped before its optimizer is made: wrap it afterwards")
    return bool(wraps)


def check_moves(put: Training, models: list[str], place: ast.stmt) -> None:
    """Refuse models that move after their optimizers are made."""
    for call in put.calls:
        owner, method = method_of(call)
        here = put.program.function_of(call) is put.program.function_of(place)
        if owner in models and method in MOVES and here and put.offset(call) > put.source.span(place)[1]:
            raise UnclearError(call, "A352", f"{owner} is moved or cast after its optimizer is made: do that before")


def _check_loaded(put: Training, place: ast.stmt) -> None:
    """Refuse optimizers that are loaded or stepped before ``initialize``."""
    end = put.source.span(place)[1]
    for call in put.calls:
        here = put.program.function_of(call) is put.program.function_of(place)
        owner, method = method_of(call)
        early = method in ("load_state_dict", "step") and put.offset(call) < end
        if here and owner in put.targets and early:
            raise UnclearError(call, "A351", f"{owner} is used before all optimizers are made")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


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
