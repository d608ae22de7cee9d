# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find where a program needs the model inside a DistributedDataParallel."""

from __future__ import annotations

import ast
import re

from apex_npu.migrate.amp.training import Training
from apex_npu.migrate.engine.program import Program, UnclearError
from apex_npu.migrate.engine.syntax import argument, constant, text
from apex_npu.migrate.rules.targets import replaced, torch_name

# Attributes that DistributedDataParallel has as well and that do the same there.
_SHARED = """
    parameters train eval zero_grad buffers to cuda npu cpu float half double bfloat16 requires_grad_ training
    register_forward_hook register_forward_pre_hook register_full_backward_hook apply forward compile
"""
# Attributes that give other names or other modules there.
_STATES = ("state_dict", "load_state_dict")
_INSIDE = (*_STATES, "named_parameters", "named_buffers", "named_modules", "named_children", "modules", "children")
# Functions that treat DistributedDataParallel differently from the model.
_LOOKS = "len enumerate iter list tuple reversed zip isinstance type hasattr getattr setattr copy.deepcopy"
# Names of arguments that are not models.
_OTHERS = re.compile(r"(^|_)opt|sched|scaler|state|dict|checkpoint|ckpt", re.IGNORECASE)


def unwrap(put: Training, model: str, place: ast.stmt) -> None:
    """Let the program use the model inside the wrapper where it needs that after ``place``.

    ``model`` is its name where its optimizer is made.

    Raises:
        UnclearError: The program reads an attribute that DistributedDataParallel does not have.
    """
    program, end = put.program, put.source.span(place)[1]
    for node in program.loaded():
        parent = program.parent(node)
        used = parent.attr if isinstance(parent, ast.Attribute) else ""
        kept = _kept_in(program, node)
        if used in _SHARED.split() or not (used or kept or _looks_inside(program, node)):
            continue
        if not _is_model(put, model, node, set()):
            continue
        if program.function_of(node) is program.function_of(place) and put.offset(node) < end:
            continue
        if used and used not in _INSIDE:
            reason = f"{ast.unparse(node)}.{used} is used, which DistributedDataParallel does not have"
            raise UnclearError(node, "P604", reason)
        if kept:
            raise UnclearError(node, "P604", f"{kept} is saved with a whole model: save its state_dict()")
        edit = replaced(program, node, f'getattr({text(node)}, "module", {text(node)})')
        program.report("P604", "changed", node, [edit])


def _is_model(put: Training, model: str, node: ast.AST, seen: set[ast.AST]) -> bool:
    """Return whether an expression is the model: its name, an argument that gets it, or another name for it."""
    name = text(node)
    if not name or name == model or node in seen:  # a name may be assigned from itself
        return name == model
    seen.add(node)
    return any(_is_model(put, model, value, seen) for value in put.values(name, node))


def unwrap_arguments(program: Program) -> None:
    """Let an imported file save the state of the model inside the wrapper, if an argument is wrapped.

    Raises:
        UnclearError: The file has no name for torch.
    """
    assigned = {
        text(target)
        for one in program.every(ast.Assign)
        if program.is_argument(one, text(one.value))
        for target in one.targets
        if isinstance(target, ast.Attribute)
    }
    torch = torch_name(program)
    for node in program.every(ast.Name, ast.Attribute):
        name, parent = text(node), program.parent(node)
        if name in ("", "self") or _OTHERS.search(name.rpartition(".")[2]):
            continue
        states = isinstance(parent, ast.Attribute) and parent.attr in _STATES
        given = name in assigned or ("." not in name and program.is_argument(node, name))
        if not (states or _is_saved(program, node)) or not given:
            continue
        if torch is None:
            raise UnclearError(node, "P604", "torch is not imported by its name at the top level")
        wrapped = f"isinstance({name}, {torch}.nn.parallel.DistributedDataParallel)"
        edit = replaced(program, node, f"({name}.module if {wrapped} else {name})")
        program.report("P604", "changed", node, [edit])


def _looks_inside(program: Program, node: ast.expr) -> bool:
    """Return whether the expression around a model takes its modules or saves it, and does not call it."""
    parent = program.parent(node)
    if isinstance(parent, ast.Subscript):
        return parent.value is node
    if isinstance(parent, (ast.For, ast.AsyncFor, ast.comprehension)):
        return parent.iter is node
    if isinstance(parent, ast.Call) and node in parent.args:
        name = program.dotted(parent.func) or text(parent.func)
        named = parent.args[1] if len(parent.args) > 1 else None
        if name in _LOOKS.split():
            return constant(named) != "module"
    return isinstance(parent, ast.Starred) or _is_saved(program, node)


def _is_saved(program: Program, node: ast.expr) -> bool:
    """Return whether ``torch.save`` gets ``node``, directly or in a dict, list or tuple."""
    at, parent = _outermost(program, node)
    call = program.parent(parent) if isinstance(parent, ast.keyword) else parent
    return isinstance(call, ast.Call) and program.dotted(call.func) == "torch.save" and argument(call, 0, "obj") is at


def _outermost(program: Program, node: ast.AST) -> tuple[ast.AST, ast.AST | None]:
    """Return the outermost dict, list or tuple around a node, or the node itself, and the parent of that."""
    parent = program.parent(node)
    while isinstance(parent, (ast.Dict, ast.List, ast.Tuple)):
        node, parent = parent, program.parent(parent)
    return node, parent


def _kept_in(program: Program, node: ast.expr) -> str:
    """Return the name of a dict, list or tuple that contains ``node`` and that ``torch.save`` gets, or ""."""
    at, parent = _outermost(program, node)
    if at is node or not isinstance(parent, ast.Assign):
        return ""
    names = set(map(text, parent.targets)) - {""}
    used = (one for one in program.every(ast.Name, ast.Attribute) if text(one) in names)
    return next((text(one) for one in used if _is_saved(program, one)), "")
