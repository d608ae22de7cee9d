# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Insert one call of ``amp.initialize`` into a file, after the optimizers are made."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from apex_npu.migrate.engine.program import PARALLEL, UnclearError
from apex_npu.migrate.engine.syntax import method_of, text
from apex_npu.migrate.rules.targets import torch_name

from .training import MOVES, Made, Training

# The arguments of ``amp.initialize`` that make processes average their gradients; ``{}`` is the name of torch.
COMBINE = "combine_grad=True, combine_ddp={}.distributed.is_initialized()"
_WRAPPER = re.compile(r"(torch|apex|apex_npu)\..*(DistributedDataParallel|DataParallel)|torch\.compile")


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
