# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules that add amp to a program. They make all the changes or none. ``training.py`` analyses the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from apex_npu.migrate.engine.names import imported
from apex_npu.migrate.engine.program import Finding, Program, UnclearError
from apex_npu.migrate.rules import weights
from apex_npu.migrate.rules.apex import body_of
from apex_npu.migrate.rules.tables import TRAINERS
from apex_npu.migrate.rules.targets import UNNAMED

from .averaging import averaged
from .initialize import place_of, put_initialize
from .losses import clip, float_input, float_inputs, put_checkpoints, scale
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
    by_hand = next(averaged(program), None)
    if by_hand is not None:
        raise UnclearError(by_hand, "A354", _AVERAGED)
    statements = [one.statement for one in put.made] + [one.statement for one in put.backwards]
    for node in program.every(ast.Name, ast.Attribute):
        dotted, used = program.dotted(node), node.attr if isinstance(node, ast.Attribute) else ""
        package = dotted.partition(".")[0]
        if _SHARDED.fullmatch(dotted):
            raise UnclearError(node, "A354", "parameters are sharded: use torch's own mixed precision")
        if package in TRAINERS and statements:
            raise UnclearError(node, "A354", f"{package} runs the training loop: use its own mixed precision")
        if dotted in ("torch.autograd.grad", "torch.autograd.backward"):
            raise UnclearError(node, "A353", f"{dotted} is used, and amp does not scale its gradients")
        if used in ("grad", "share_memory") and put.casts_model and statements:
            raise UnclearError(node, "A354", f"{used} is used, but at this level the optimizer steps float32 values")
    if statements and not put.amp:
        raise UnclearError(statements[0], "A354", UNNAMED)
