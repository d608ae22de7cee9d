# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules that add amp to a program. They make all the changes or none. ``training.py`` analyses the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from apex_npu.migrate.engine.names import imported
from apex_npu.migrate.engine.program import Finding, Program, UnclearError
from apex_npu.migrate.engine.syntax import constant, given_to, keywords, last_name, text
from apex_npu.migrate.rules import weights
from apex_npu.migrate.rules.apex import body_of
from apex_npu.migrate.rules.tables import TRAINERS
from apex_npu.migrate.rules.targets import UNNAMED

from .changes import clip, float_input, float_inputs, place_of, put_checkpoints, put_initialize, scale
from .training import Training

LEVELS = ("O1", "O2", "O4", "O5")
_OURS = re.compile(r"apex(_npu)?\.amp(\..*)?|apex(_npu)?\.fp16_utils(\..*)?")
_SHARDED = re.compile(r"torch\.distributed\..*(FullyShardedDataParallel|fully_shard|distribute_\w+|parallelize_module)")
_CLIP = re.compile(r"torch\.nn\.utils\.(clip_grad\.)?clip_grad_(norm|value)_?")
_BCE = re.compile(r"torch\.nn\.(modules\.loss\.)?BCELoss")
_AVERAGED = (
    "gradients are averaged here, outside of amp: where those of one process overflow, the others would step with "
    "them. Let DistributedDataParallel average them, inside of backward"
)
_NOT_GIVEN = {"models", "optimizers", "opt_level", "enabled", "num_losses", "fuse_unscale"} | {
    *("combine_ddp", "process_group", "overflow_group", "cast_model_type", "ddp_reduce_dtype", "cast_model_outputs")
}


_COLLECTIVE = re.compile(r"torch\.distributed\..*(reduce|gather|broadcast|all_to_all)\w*")
# Names of functions in other libraries and files that average gradients.
_NAMED_SO = re.compile(r"all_?reduce|(average|reduce|sync)\w*grad", re.IGNORECASE)
# The results of these functions on a gradient are not gradients.
_NO_GRADIENT = re.compile("all|any|isfinite|isinf|isnan|item|max|mean|min|norm|numel|size|sum")
# Methods after which a tensor that is no parameter has a gradient.
_REQUIRING = ("requires_grad_", "retain_grad")
_KEPT_BY = ("add", "append", "extend", "insert")

# A variable: the scope that binds it and its name, or "returned" and a function. Attributes are known by their text.
_Variable = tuple[object, str]


def check(program: Program) -> None:
    """Report what the rules for amp find."""
    if not program.options.amp:
        return
    has_amp = _has_amp(program)
    if has_amp is not None:
        program.note("A350", has_amp, "the program already uses amp")
        return
    put = program.all_or_none(_reported, ["amp"])
    if put is not None and put.casts_model and put.made:
        models = {model for made in put.made for model in made.models}
        weights.report(program, put.targets | models, [place_of(put)], (weights.ADDED,))


def arguments_of_initialize() -> frozenset[str]:
    """Return the arguments of ``amp.initialize`` that ``--amp-args`` accepts.

    They are read from its source, which is not imported. Arguments that the rules pass are left out, and so are
    arguments that need another training loop: several loss scales, gradients that stay scaled, ``combine_ddp``.
    """
    functions = (node for node in body_of("apex_npu.amp.frontend") if isinstance(node, ast.FunctionDef))
    given = next(node.args for node in functions if node.name == "initialize")
    return frozenset(one.arg for one in (*given.args, *given.kwonlyargs)) - _NOT_GIVEN


def why_left(files: Iterable[Sequence[Finding]]) -> str:
    """Return why amp cannot be added to the program with these findings; "" if it can be, or if no rule applies."""
    found = [finding for findings in files for finding in findings if finding.rule[0] in "AT"]
    rules = [finding.rule for finding in found if finding.status == "changed"]
    left = next((one for one in found if one.status in ("refused", "kept")), None)
    if left is not None and rules:
        return f"{left.path}:{left.line} ({left.rule}): {left.message}"
    if "A350" in [finding.rule for finding in found] and rules:
        return "a part of the program already uses amp"
    if rules and "A301" not in rules:
        return "no optimizer of a known class is made here"
    if rules and not {"A302", "T402"} & {*rules}:
        return "no call of backward was found"
    return "optimizers are made in several files" if rules.count("A301") > 1 else ""


def drop_covered(program: Program) -> None:
    """Drop findings in text that is removed with torch.amp or from an optimizer's call, or that amp would cause."""
    left_out = not any(draft.rule[0] in "AT" for draft in program.changes())
    edits = [(draft.rule[0], edit) for draft in program.changes() for edit in draft.edits]
    spans = [(edit.start, edit.end) for family, edit in edits if family == "T" or (family == "O" and not edit.text)]
    program.drafts = [
        draft
        for draft in program.drafts
        if draft.rule[0] == "T"
        or not (
            any(start <= draft.start < draft.end <= end for start, end in spans)
            or (left_out and weights.ADDED in draft.links)
        )
    ]


def _has_amp(program: Program) -> ast.stmt | None:
    """Return the first import of Apex's or apex_npu's amp, or the first statement that uses it."""
    for node in program.every(ast.Import, ast.ImportFrom):
        if any(map(_OURS.fullmatch, imported(node))):
            return node
    used = next((node for node in program.every(ast.Attribute) if _OURS.fullmatch(program.dotted(node))), None)
    return None if used is None else program.statement_of(used)


def _reported(program: Program) -> Training:
    """Report all findings and changes. Return what they need to know."""
    put = Training(program)
    torch_amp = put.torch_amp
    _check_libraries(put)
    if put.made:
        put_initialize(put)
    elif torch_amp.enabled or torch_amp.is_bfloat16:
        first = next(iter([*torch_amp.made, *(block for block, _ in torch_amp.blocks)]))
        raise UnclearError(first, "A355", "its settings belong to amp.initialize, which is in another file")
    torch_amp.report(put.amp)
    for backward in put.backwards:
        scale(put, backward)
    for call in put.calls:
        name = put.program.dotted(call.func)
        if _CLIP.fullmatch(name):
            clip(put, call)
        elif _BCE.fullmatch(name):
            float_inputs(put, call)
        elif name == "torch.nn.functional.binary_cross_entropy":
            float_input(put, call)
    put_checkpoints(put)
    return put


def _check_libraries(put: Training) -> None:
    program = put.program
    by_hand = next(_averaged(program), None)
    if by_hand is not None:
        raise UnclearError(by_hand, "A354", _AVERAGED)
    statements = [one.statement for one in put.made] + [one.statement for one in put.backwards]
    for node in program.every(ast.Name, ast.Attribute):
        dotted = program.dotted(node)
        package = dotted.partition(".")[0]
        if _SHARDED.fullmatch(dotted):
            raise UnclearError(node, "A354", "parameters are sharded: use torch's own mixed precision")
        if package in TRAINERS and statements:
            raise UnclearError(node, "A354", f"{package} runs the training loop: use its own mixed precision")
        if dotted in ("torch.autograd.grad", "torch.autograd.backward"):
            raise UnclearError(node, "A353", f"{dotted} is used, and amp does not scale its gradients")
        if getattr(node, "attr", "") == "share_memory" and put.casts_model and statements:
            raise UnclearError(
                node, "A354", "share_memory shares 16-bit weights at this level, not their float32 values"
            )
    read = next(_grads_of_inputs(program), None)
    if read is not None and statements and put.level in ("O1", "O2"):
        raise UnclearError(read, "A353", "amp leaves gradients of inputs multiplied by the loss scale")
    if statements and not put.amp:
        raise UnclearError(statements[0], "A354", UNNAMED)


def _grads_of_inputs(program: Program) -> Iterator[ast.Attribute]:
    """Yield where ``.grad`` of a tensor is read that the program lets require it, such as an input of the model.

    Variables of loops are left out: where a loop sets ``requires_grad``, it unfreezes parameters.
    """
    inputs: set[_Variable] = set()
    for node in program.names.nodes:
        if isinstance(node, ast.Assign):
            made = node.value if isinstance(node.value, ast.Call) else None
            if made is not None and (last_name(made.func) in _REQUIRING or "requires_grad" in keywords(made)):
                inputs |= set().union(*(_stored(program, one) for one in node.targets))
            switched = [one for one in node.targets if isinstance(one, ast.Attribute) and one.attr == "requires_grad"]
            if constant(node.value) is not False:
                inputs |= {_variable(program, one.value) for one in switched}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _REQUIRING:
            inputs.add(_variable(program, node.func.value))
    for node in program.every(ast.For, ast.comprehension):
        inputs -= _stored(program, node.target)
    for attribute in program.every(ast.Attribute):
        # Attributes are left out, too: they may be parameters of a module.
        of_name = isinstance(attribute.value, ast.Name) and _variable(program, attribute.value) in inputs
        if attribute.attr == "grad" and of_name and isinstance(attribute.ctx, ast.Load):
            yield attribute


def _averaged(program: Program) -> Iterator[ast.Call]:
    """Yield the collectives that get gradients, and calls of functions in other files that are named like one.

    Gradients are followed from ``.grad`` through names, lists and functions of the file.
    """
    if not any(node.attr == "grad" for node in program.every(ast.Attribute)):
        return
    functions = {node.name: node for node in program.every(ast.FunctionDef)}
    flows = [flow for node in program.names.nodes for flow in _flows(program, node, functions)]
    held: set[_Variable] = set()
    while grown := set().union(*(targets for value, targets in flows if _holds(program, value, held))) - held:
        held |= grown
    for call in program.every(ast.Call):
        dotted, name = program.dotted(call.func), last_name(call.func)
        elsewhere = name not in functions and not dotted.startswith("torch.")
        collective = _COLLECTIVE.fullmatch(dotted) or (elsewhere and _NAMED_SO.search(name))
        given = [*call.args, *(one.value for one in call.keywords)]
        if collective and any(_holds(program, one, held) for one in given):
            yield call


def _holds(program: Program, node: ast.AST, held: set[_Variable]) -> bool:
    """Return whether an expression contains gradients, which the variables ``held`` do."""
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        if _NO_GRADIENT.fullmatch(name):
            return False
        if ("returned", name) in held:
            return True
    if getattr(node, "attr", "") == "grad" or (text(node) and _variable(program, node) in held):
        return True
    return any(_holds(program, one, held) for one in ast.iter_child_nodes(node))


def _variable(program: Program, node: ast.AST) -> _Variable:
    name = text(node)
    return (None if "." in name else program.names.scope(node).find(name), name)


def _stored(program: Program, target: ast.AST) -> set[_Variable]:
    """Return the variables that an assignment to ``target`` binds, or whose elements it sets."""
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*(_stored(program, one) for one in target.elts))
    return {_variable(program, target)} if text(target) else set()


def _flows(
    program: Program, node: ast.AST, functions: Mapping[str, ast.FunctionDef]
) -> Iterator[tuple[ast.AST, set[_Variable]]]:
    """Yield what a node stores or returns: the value, and the variables that get it."""
    if isinstance(node, ast.Assign):
        yield from ((node.value, _stored(program, target)) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        yield node.value, _stored(program, node.target)
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield node.iter, _stored(program, node.target)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield node.value, {("returned", getattr(program.names.scope(node).node, "name", ""))}
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _KEPT_BY:
            kept = node.func.value
            if isinstance(kept, ast.Call):  # d.setdefault(key, []).append
                kept = getattr(kept.func, "value", kept.func)
            yield from ((one, _stored(program, kept)) for one in node.args)
        function = functions.get(last_name(node.func))
        if function is not None:
            inside: object = program.names.scope(function.body[0])
            yield from ((value, {(inside, name)}) for name, value in given_to(function, node).items())
