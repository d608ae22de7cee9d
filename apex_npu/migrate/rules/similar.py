# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules for what is only similar (``--similar``): torch.profiler becomes torch_npu.profiler."""

from __future__ import annotations

import ast

from apex_npu.migrate.engine.program import Program

from .ours import torch_import
from .tables import PROFILER_NAMES
from .targets import replaced

_SIMILAR = "similar: its results are files for MindStudio, and it has no key_averages()"


def check(program: Program) -> None:
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
