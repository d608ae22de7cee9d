# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The code that the rules write: for npu or for all devices (``--to portable``), and imports of apex_npu."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from apex_npu.migrate.engine.names import imported, module_of
from apex_npu.migrate.engine.program import LITERAL, Program
from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import constant, is_told

from .tables import RENAMED, SIMILAR

# torch.accelerator has these names of torch.cuda since torch 2.6. They return 0 and False without an accelerator.
_ACCELERATOR_NAMES = frozenset({"device_count", "is_available"})
# torch.cpu has these names of torch.cuda since torch 2.6. Its functions do nothing.
_CPU_NAMES = frozenset(
    {"current_device", "current_stream", "Event", "set_device", "stream", "Stream", "StreamContext", "synchronize"}
)
OTHER_NAMES = RENAMED | SIMILAR
# Names in portable code. Without an accelerator, the first is "cpu", the device to compute on. The second is then
# "cuda": the functions of torch.cuda also work without a GPU, and a comparison with "cuda" is false as before.
_ACCELERATOR, _OR_CUDA = "ACCELERATOR", "ACCELERATOR_OR_CUDA"
_FIRST_LINE = '{} = {}.accelerator.current_accelerator().type if {}.accelerator.is_available() else "{}"'
# Methods of strings that search for a string.
SEARCHES = ("startswith", "endswith", "index", "find", "count", "__eq__", "split", "replace")
_OPEN = re.compile(r"[\s\\]*\(")
# Nodes in which a comparison needs no parentheses.
_LOOSE = (ast.If, ast.While, ast.Assert, ast.Assign, ast.Return, ast.BoolOp, ast.keyword)


class Npu:
    """Writes code for npu. Methods return edits; an edit that is None means that there is no such code."""

    is_npu = True  # whether imports of torch.cuda, and environment variables, are rewritten
    profiled = '"npu"'  # the source of the device for a profiler

    def first_lines(self, program: Program) -> list[str]:
        """Return the lines to add after the import of torch that the program does not have yet."""
        return [] if "torch_npu" in program.names.module.bindings else ["import torch_npu  # noqa: F401"]

    def device(self, program: Program, node: ast.Constant, prefix: str = "") -> Edit | None:
        """Change a string that begins with ``prefix`` and "cuda". With several processes, "cuda:0" loses its number."""
        if program.options.data_parallel and node.value == "cuda:0":
            return program.restring(node, "npu")
        return program.restring(node, f"{prefix}npu", len(f"{prefix}cuda"))

    def fstring(self, program: Program, node: ast.JoinedStr, span: tuple[int, int]) -> Edit:
        """Change an f-string that begins with "cuda:"; ``span`` is the span of "cuda"."""
        return Edit(*span, "npu")

    def backend(self, program: Program, node: ast.Constant) -> Edit | None:
        """Change the string "nccl", or a string with backends of several devices."""
        assert isinstance(node.value, str)
        new = "hccl" if node.value == "nccl" else node.value.replace("cuda:nccl", "npu:hccl")
        return program.restring(node, new)

    def name(self, program: Program, node: ast.expr, parts: list[str]) -> list[Edit | None]:
        """Change a name of torch.cuda; ``parts`` are its parts after torch.cuda."""
        edits: list[Edit | None] = []
        for part in ["torch", "cuda", *parts][::-1]:
            if not isinstance(node, ast.Attribute):
                break
            is_root = part == "cuda" and program.dotted(node) == "torch.cuda"
            new = "npu" if is_root else OTHER_NAMES.get(part)
            if new is not None:
                edits.append(program.rename(node, new))
            node = node.value
        return edits

    def move(self, program: Program, called: ast.Attribute, call: ast.Call | None) -> list[Edit | None]:
        """Change the method ``cuda`` and its call."""
        return [program.rename(called, "npu")]

    def is_on(self, program: Program, node: ast.Attribute) -> list[tuple[tuple[int, int], Edit | None]]:
        """Change the attribute ``is_cuda``. Return the reported spans, each with its edit."""
        return [(program.method_span(node), program.rename(node, "is_npu"))]

    def group_lines(self, torch: str) -> list[str]:
        """Return the lines that make a process under ``torchrun`` select its card and join the others."""
        card = 'int(os.environ["LOCAL_RANK"])'
        lines = [f"{torch}.npu.set_device({card})", f'{torch}.distributed.init_process_group("hccl")']
        return ['if "LOCAL_RANK" in os.environ:', *(f"    {line}" for line in lines)]


class Portable(Npu):
    """Writes code that asks torch for the accelerator."""

    is_npu = False
    profiled = _OR_CUDA

    def first_lines(self, program: Program) -> list[str]:
        torch, bound = torch_name(program) or "torch", program.names.module.bindings
        drafts = [draft for draft in program.drafts if draft.status in ("changed", "unsure")]
        written = " ".join(edit.text for draft in drafts for edit in draft.edits)
        lines = {
            _ACCELERATOR: _FIRST_LINE.format(_ACCELERATOR, torch, torch, "cpu"),
            _OR_CUDA: _FIRST_LINE.format(_OR_CUDA, torch, torch, "cuda") + "  # migrate: keep",
        }
        return [line for name, line in lines.items() if name not in bound and re.search(rf"\b{name}\b", written)]

    def device(self, program: Program, node: ast.Constant, prefix: str = "") -> Edit | None:
        quote = LITERAL.match(program.source.text, program.source.span(node)[0])
        if quote is None or not program.restring(node, "") or isinstance(program.parent(node), ast.MatchValue):
            return None
        assert isinstance(node.value, str)
        rest = node.value[len(f"{prefix}cuda") :]
        rest = "" if rest == ":0" and program.options.data_parallel else rest
        rest = rest.replace("{", "{{").replace("}", "}}")
        raw, name = quote[1] if quote[1] in "rR" else "", _device_name(program, node)
        text = f"f{raw}{quote[2]}{prefix}{{{name}}}{rest}{quote[2]}" if prefix or rest else name
        return replaced(program, node, text)

    def fstring(self, program: Program, node: ast.JoinedStr, span: tuple[int, int]) -> Edit:
        return Edit(*span, f"{{{_device_name(program, node)}}}")

    def backend(self, program: Program, node: ast.Constant) -> Edit | None:
        torch = torch_name(program)
        if node.value != "nccl" or torch is None or program.restring(node, "") is None:
            return None
        device = _device_name(program, node)
        return replaced(program, node, f"{torch}.distributed.get_default_backend_for_device({device})")

    def name(self, program: Program, node: ast.expr, parts: list[str]) -> list[Edit | None]:
        if parts and (parts[0] in RENAMED or parts[0] == "amp"):
            return [None]  # the name or the arguments depend on the device
        call = program.call_of(node)
        while program.dotted(node) != "torch.cuda":
            if not isinstance(node, ast.Attribute):
                return []  # the import of this name is changed instead
            node = node.value
        if not isinstance(node, ast.Attribute):
            return []
        root = program.written(node).rpartition(".")[0].rstrip()
        device = _ACCELERATOR if parts and parts[0] in _CPU_NAMES else _OR_CUDA
        if parts == ["Event"] and call is not None and (call.args or call.keywords):
            device = _OR_CUDA  # torch.cpu.Event takes no arguments
        module = "accelerator" if parts and parts[0] in _ACCELERATOR_NAMES else f"get_device_module({device})"
        if not root.isidentifier() or program.rename(node, "") is None:
            return [None]
        return [replaced(program, node, f"{root}.{module}")]

    def move(self, program: Program, called: ast.Attribute, call: ast.Call | None) -> list[Edit | None]:
        first = program.rename(called, "to")
        if call is None or first is None or "cuda" in program.options.owned or len(call.args) > 1 or not is_told(call):
            return [None]
        if any(keyword.arg == "device" for keyword in call.keywords):
            return [first]
        if call.args:
            given = call.args[0]
            if not isinstance(given, (ast.Name, ast.Attribute)):
                return [None if constant(given) is None else first]
            name = program.written(given)
            return [first, replaced(program, given, f"{_ACCELERATOR} if {name} is None else {name}")]
        opened = _OPEN.match(program.source.text, first.end)
        if opened is None:
            return [None]
        text = f"{_ACCELERATOR}, " if call.keywords else _ACCELERATOR
        return [first, Edit(opened.end(), opened.end(), text)]

    def is_on(self, program: Program, node: ast.Attribute) -> list[tuple[tuple[int, int], Edit | None]]:
        span = program.method_span(node)
        parent = program.parent(node)
        bare = isinstance(parent, _LOOSE) or (isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not))
        bare = bare or (isinstance(parent, ast.Call) and node in parent.args)

        placed = program.rename(node, "") is not None
        text = f".device.type == {_OR_CUDA}{'' if bare else ')'}"
        edits: list[tuple[tuple[int, int], Edit | None]] = [(span, Edit(*span, text) if placed else None)]
        if not bare and placed:
            start = program.source.span(node)[0]
            edits.append(((start, start), Edit(start, start, "(")))
        return edits

    def group_lines(self, torch: str) -> list[str]:
        backend = f"{torch}.distributed.get_default_backend_for_device({_ACCELERATOR})"
        return [
            'if "LOCAL_RANK" in os.environ:',
            f"    if {torch}.accelerator.is_available():",
            f'        {torch}.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))',
            f"    {torch}.distributed.init_process_group({backend})",
        ]


def _device_name(program: Program, node: ast.expr) -> str:
    """Return ACCELERATOR_OR_CUDA if the program compares ``node`` or looks it up, and else ACCELERATOR."""
    at: ast.AST = node
    parent = program.parent(at)
    while isinstance(parent, (ast.Tuple, ast.List, ast.Set, ast.Starred, ast.BinOp, ast.IfExp)) or (
        isinstance(parent, ast.Attribute) and parent.attr == "format"
    ):
        at, parent = parent, program.parent(parent)
        if isinstance(parent, ast.Call) and parent.func is at:
            at, parent = parent, program.parent(parent)
    compared = isinstance(parent, ast.Compare) or (isinstance(parent, ast.Dict) and at in parent.keys)
    compared |= isinstance(parent, ast.Subscript) and parent.slice is at
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and at in parent.args:
        compared = parent.func.attr in SEARCHES
    return _OR_CUDA if compared else _ACCELERATOR


TARGETS: dict[str, Npu] = {"npu": Npu(), "portable": Portable()}


def target_of(program: Program) -> Npu:
    """Return the object that writes code for the target of ``program``."""
    return TARGETS[program.options.to]


def torch_name(program: Program) -> str | None:
    """Return the name of torch at the top level, or None."""
    module = program.names.module
    return next((name for name in module.bindings if program.names.meanings(name, module) == {"torch"}), None)


def replaced(program: Program, node: ast.expr, text: str) -> Edit:
    """Return an edit that replaces ``node`` by ``text``, with spaces if names are next to it."""
    (start, end), whole = program.source.span(node), program.source.text
    before = " " if re.match(r"\w", whole[start - 1 : start]) else ""
    after = " " if re.match(r"\w", whole[end : end + 1]) else ""
    return Edit(start, end, f"{before}{text}{after}")


UNNAMED = "torch is not imported at the top level, or the name apex_npu means something else here"


def torch_import(program: Program) -> ast.stmt | None:
    """Return the first import of torch at the top level, or one that gets torch from another file.

    Portable code needs the name torch, so that an import of a part of torch does not count.
    """
    portable = program.options.to == "portable"
    for node in program.tree.body:
        modules = imported(node) if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules += [node.module or ""] if not node.level and not portable else []
            exported = program.options.exports.get(module_of(node), {})
            star = node.names[0].name == "*"
            modules += exported.values() if star else [exported.get(one.name, "") for one in node.names]
        if any((module if portable else module.partition(".")[0]) == "torch" for module in modules):
            return node
    return None


def name_of(program: Program, part: str) -> str | None:
    """Return the name under which the program can use ``part`` of apex_npu; None if it cannot be imported."""
    if torch_import(program) is None:
        return None
    if not program.names.is_taken(part, f"apex_npu.{part}"):
        return part
    return None if program.names.is_taken("apex_npu", "apex_npu") else f"apex_npu.{part}"


def missing_imports(program: Program, parts: Iterable[str]) -> list[str]:
    """Return the imports of ``parts`` under the names of ``name_of``, without those that the program has."""
    bound = program.names.module.bindings
    written = {part: name_of(program, part) for part in parts}
    plain = [part for part, name in written.items() if name == part and part not in bound]
    lines = [f"from apex_npu import {', '.join(plain)}"] if plain else []
    if any(name != part for part, name in written.items()) and "apex_npu" not in bound:
        lines.append("import apex_npu")
    return lines
