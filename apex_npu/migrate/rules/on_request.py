# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules that apply where they are asked for: ``--similar`` (the profiler of torch_npu), ``--select N`` (advice)."""

from __future__ import annotations

import ast

from apex_npu.migrate.engine.program import Program

from .catalogue import RULES
from .tables import PROFILER_NAMES
from .targets import replaced, torch_import

_SIMILAR = "similar: its results are files for MindStudio, and it has no key_averages()"


def check_similar(program: Program) -> None:
    """Say what becomes of the profiler, where a program records what CUDA does."""
    if not program.options.similar or program.options.to != "npu":
        return
    names = program.names
    dotted = {
        node: names.dotted(node) or ""
        for node in names.nodes
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)
    }
    if "torch.profiler.ProfilerActivity.CUDA" not in dotted.values():
        return
    for node, name in dotted.items():
        new = PROFILER_NAMES.get(name.removeprefix("torch.profiler."), "") if name.startswith("torch.profiler.") else ""
        if not new or _is_longer(program, node, dotted):
            continue
        call = program.parent(node)
        given = call.keywords if isinstance(call, ast.Call) and call.func is node else []
        refusal = "" if torch_import(program) else "torch is not imported at the top level"
        if any(one.arg in ("use_cuda", "use_device") for one in given):
            refusal = "give it activities in place of use_cuda"
        edit = replaced(program, node, f"torch_npu.profiler.{new}")
        status = "refused" if refusal else "changed"
        program.report("D110", status, node, [] if refusal else [edit], refusal or _SIMILAR, ["profiler"])


def _is_longer(program: Program, node: ast.AST, dotted: dict[ast.Name | ast.Attribute, str]) -> bool:
    """Whether the attribute around ``node`` is the name that is changed."""
    parent = program.parent(node)
    return (
        isinstance(parent, ast.Attribute) and dotted.get(parent, "").removeprefix("torch.profiler.") in PROFILER_NAMES
    )


_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_INT64 = ("torch.int64", "torch.long")


def check_advice(program: Program) -> None:
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
