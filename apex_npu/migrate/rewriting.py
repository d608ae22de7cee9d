# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``rewrite`` applies all rules to one program, and checks that nothing outside the reported spans has changed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from apex_npu.migrate.amp import check as amp
from apex_npu.migrate.engine.names import imported
from apex_npu.migrate.engine.program import Draft, Finding, Options, Program
from apex_npu.migrate.engine.source import Edit, Source, UnreadableError, tree_of
from apex_npu.migrate.parallel import convert as data_parallel
from apex_npu.migrate.rules import apex, device, fused, own, strings, weights
from apex_npu.migrate.rules.tables import TRAINERS
from apex_npu.migrate.rules.targets import missing_imports, target_of, torch_import

__all__ = ["TRIGGER", "Rewritten", "rewrite"]

# The rules find nothing in a file without any of these.
TRIGGER = re.compile(
    rb"cuda|CUDA|nccl|NCCL|apex|amp_C|change_data_ptr|DataParallel|data_parallel|backends\.cudnn|flash_attn|xformers"
    rb"|bitsandbytes|cupy|pynvml|tensorrt|torch2trt|transformer_engine|nvidia\.dali"
    rb"|optim|backward|\.grad\b|autocast|torch\.save|GradScaler|fully_shard|FullyShard"
    rb"|DataLoader|\.long\b|int64|channels_last|" + b"|".join(map(str.encode, TRAINERS))
)
# Text by which a program may define a name of its own that rules would rename.
_DEFINES = re.compile(rb"\bis_cuda\s*[:=]|\bdef\s+(is_)?cuda\b|[\"']-{1,2}is[-_]cuda")
_SHARED_LINE = (
    "the import of torch shares its line with code that needs a new line before it: put that code on its own line"
)
_NO_TORCH = "torch is not imported at the top level: the script must import torch_npu before this file"
# Functions that are called for each node of a type, and functions that are called for the whole program afterwards.
_Handler = Callable[[Program, Any], None]
_HANDLERS: tuple[Mapping[type[ast.AST], _Handler], ...] = (device.HANDLERS, apex.HANDLERS, fused.HANDLERS)  # type: ignore[assignment]
_FAMILIES = (strings.check, weights.check, amp.check, data_parallel.check, own.check)
# The rules for names of devices in strings.
_STRINGS = ("D105", "D106", "D107")
# The rules that add npu to a file.
_NPU_NAMES = ("D101", "D102", "D103", "D104", "D105", "D106", "D107", "D108", "D109", "D110", "D111", "D151", "P601")


@dataclass(frozen=True)
class Rewritten:
    """A program after the rules, as text or bytes like the input, and the findings in the order of the file."""

    source: str | bytes
    findings: tuple[Finding, ...]
    edits: tuple[Edit, ...] = ()  # those of the old text that give the new one


def rewrite(source: str | bytes, path: str = "train.py", options: Options | None = None) -> Rewritten:
    """Apply the rules to one Python program. Nothing is executed or written.

    Args:
        source: The program; bytes keep their encoding, byte order mark and line ends.
        path: The path in the findings.
        options: Which rules apply, and how.

    Returns:
        The new program and the findings. For a program that cannot be read, the only finding is of the family F.

    Example::

        >>> rewritten = migrate.rewrite("from apex import amp")
        >>> rewritten.source
        'from apex_npu import amp'
        >>> rewritten.findings[0].rule
        'X201'
    """
    options = options or Options()
    rewritten = rewrite_part(source, path, options)
    left = amp.why_left([rewritten.findings])
    return (
        rewrite_part(source, path, replace(options, left={"amp": f"amp is not added: {left}"})) if left else rewritten
    )


def concerns(data: bytes, options: Options) -> bool:
    """Return whether the rules may find something in a file. This only searches its bytes."""
    return bool(options.data_parallel or own.concerns(data, options.own) or TRIGGER.search(data))


def rewrite_part(source: str | bytes, path: str, options: Options) -> Rewritten:
    """Rewrite one file of a program. The caller decides whether amp can be added to all of its files."""
    data = source if isinstance(source, bytes) else source.encode("utf-8", "surrogatepass")
    if not concerns(data, options):
        return Rewritten(source, ())
    options = replace(options, owned=options.owned | owned_names(data))
    try:
        program = _examined(source, options, path)
        findings = program.findings(path)
        if not program.changes():
            return Rewritten(source, tuple(findings))
        text = program.rewritten()
        new = program.source.encode(text) if isinstance(source, bytes) else text
    except UnreadableError as error:
        return Rewritten(source, (unreadable(path, error),))
    except RecursionError:
        too_deep = UnreadableError("F901", "its expressions are nested too deeply for the rules")
        return Rewritten(source, (unreadable(path, too_deep),))
    return Rewritten(new, tuple(findings), tuple(program.edits()))


def _examined(source: str | bytes, options: Options, path: str) -> Program:
    """Return a program with the settled reports of all rules."""
    program = Program(Source(source), options)
    for node in program.names.nodes:
        for handlers in _HANDLERS:
            if type(node) in handlers:
                handlers[type(node)](program, node)
    for check in _FAMILIES:
        check(program)
    unsure = {draft.start for draft in program.drafts if draft.status == "unsure"}
    program.settle()
    _refuse_gated(program)
    _respect_unread(program)
    _respect_npu(program, unsure)
    amp.drop_covered(program)
    fused.check_imports(program, path)
    _add_first_lines(program)
    return program


def owned_names(data: bytes) -> frozenset[str]:
    """Return which of cuda and is_cuda a program defines itself, in a class or by ``self.is_cuda = ...``."""
    names: set[str] = set()
    methods: set[str] = set()
    for node in ast.walk(tree_of(data)) if _DEFINES.search(data) else ():
        if isinstance(node, ast.ClassDef):
            methods.update(getattr(one, "name", "") for one in node.body)
            assigned = [one for one in node.body if isinstance(one, (ast.Assign, ast.AnnAssign))]
            targets = [target for one in assigned for target in getattr(one, "targets", [getattr(one, "target", None)])]
            names.update(getattr(target, "id", "") for target in targets)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("-"):
            names.add(node.value.lstrip("-").replace("-", "_"))  # args.is_cuda
    return frozenset(methods & {"cuda", "is_cuda"} | names & {"is_cuda"})


def unreadable(path: str, error: UnreadableError) -> Finding:
    """Return the finding for a file that cannot be read."""
    return Finding(path, error.line, 1, error.rule, "refused", error.line, 1, "", None, error.reason)


def _refuse_gated(program: Program) -> None:
    """Refuse device strings in a conditional whose test is refused."""
    left = [draft for draft in program.drafts if draft.status in ("refused", "kept")]
    stay = [draft for draft in left if draft.rule in ("D101", "D151", "D156")]
    for node in program.every(ast.If, ast.IfExp) if stay else ():
        (gate, gate_end), (start, end) = program.source.span(node.test), program.source.span(node)
        cause = next((draft for draft in stay if gate <= draft.start < gate_end), None)
        if cause is not None:
            message = f"its condition stays as it is (line {program.source.place(cause.start)[0]}, {cause.rule})"
            arms = [one for one in program.drafts if one.rule in _STRINGS and start <= one.start < end]
            program.refuse_drafts(arms, message)


def _respect_unread(program: Program) -> None:
    """Refuse a file that gets torch from a module that is not read, since only some of its places would change."""
    names, places = program.names, []
    for node in program.every(ast.Name):
        if node.id in ("torch", "cuda"):
            known = names.dotted(node)
            unbound = names.stars and names.scope(node).find(node.id) is None
            places += [node] if known.endswith(".torch") or (unbound and not known) else []
    cuda = any(node.id == "cuda" or getattr(program.parent(node), "attr", "") == "cuda" for node in places)
    if places and (cuda or _device_changes(program)):
        module = names.stars[0] if names.stars else program.dotted(places[0]).rpartition(".")[0]
        message = f"{places[0].id} comes from {module}, which is not read here: import it by its own name"
        _leave_file(program, "D102", program.source.span(places[0])[0], message)


def _device_changes(program: Program) -> list[Draft]:
    return [draft for draft in program.drafts if draft.rule[0] == "D" and draft.status in ("changed", "unsure")]


def _leave_file(program: Program, rule: str, place: int, message: str) -> None:
    changes = _device_changes(program)
    count = f"; {len(changes)} place{'s are' if len(changes) > 1 else ' is'} not changed" if changes else ""
    first = Draft(rule, "refused", place, place, message=message + count)
    program.drafts = [draft for draft in program.drafts if draft not in changes] + [first]


def _respect_npu(program: Program, unsure: set[int]) -> None:
    """Refuse a file that already has code for npu, since both arms of its conditionals would name npu.

    If only ``unsure`` changes remain, these rules may have made the file's npu code, and the file is not refused.
    """
    changes = _device_changes(program)
    if program.options.force or not changes:
        return
    texts = [one for one in program.every(ast.Constant) if re.fullmatch(r"npu(:\d+)?", str(one.value))]
    places: list[ast.expr | ast.stmt] = [*texts]
    if unsure.issuperset(draft.start for draft in changes):
        devices = strings.Devices(program)
        for text in texts:
            devices.follow(text)
        places = [text for text in texts if not devices.is_place(text)]
    else:
        places += [node for node in program.every(ast.Attribute) if node.attr in ("npu", "is_npu")]
        for node in program.every(ast.Import, ast.ImportFrom):
            places += [node] if any(name.partition(".")[0] == "torch_npu" for name in imported(node)) else []
    if places:
        line = min(node.lineno for node in places)
        message = f"the file already names npu (line {line}): try it as it is, or pass --force (run: --force-files)"
        _leave_file(program, "D159", changes[0].start, message)


def _add_first_lines(program: Program) -> None:
    """Add imports after the import of torch, or before it if they are needed on its line."""
    portable = program.options.to == "portable"
    node = torch_import(program)
    lines: dict[str, list[str]] = {}
    named = [draft for draft in program.changes() if _has_npu_name(draft)]
    first_lines = target_of(program).first_lines(program) if named and (portable or program.options.has("D113")) else []
    if first_lines:
        first = min(draft.start for draft in named)
        if portable and (node is None or first < program.source.span(node)[1]):
            early = [one for one in program.drafts if one.status in ("changed", "unsure") and _has_npu_name(one)]
            reason = "portable code asks torch for the accelerator: import torch at the top level, before this"
            program.refuse_drafts(early, reason)
        elif node is None:
            program.note("D113", (first, first), _NO_TORCH)
        else:
            lines["D113"] = first_lines
    rules = {draft.rule[0] for draft in program.changes()}
    parts = [part for part, families in (("amp", {"A", "T"}), ("optimizers", {"O"})) if rules & families]
    if parts:
        lines["X202"] = missing_imports(program, parts)
    if any(draft.rule == "P601" for draft in program.changes()) and "os" not in program.names.module.bindings:
        lines["P606"] = ["import os"]
    if node is not None and lines:
        _beside_torch(program, node, lines)


def _has_npu_name(draft: Draft) -> bool:
    """Return whether a draft adds a name of npu or portable code. Arguments of amp.initialize can do so as well."""
    moved = (edit.text for edit in draft.edits if draft.rule == "A301")
    return draft.rule in _NPU_NAMES or any(re.search(r"\bnpu\b|\bACCELERATOR", text) for text in moved)


def _beside_torch(program: Program, node: ast.stmt, lines: dict[str, list[str]]) -> None:
    assert node.end_lineno is not None
    first, last, body = node.lineno, node.end_lineno, program.tree.body
    used = any(first <= program.source.place(draft.start)[0] <= last for draft in program.changes())
    index = body.index(node)
    while used and index and (body[index - 1].end_lineno or 0) >= first:
        index -= 1  # a statement of this line comes before
    while not used and index + 1 < len(body) and body[index + 1].lineno <= last:
        index += 1  # statements of this line come after
        last = body[index].end_lineno or last
    if used and program.options.to == "portable":
        raise UnreadableError("F909", _SHARED_LINE, first)
    for rule, statements in lines.items():
        edit = program.lines(body[index], statements, before=used)
        program.drafts += [Draft(rule, "changed", edit.start, edit.end, (edit,))] if statements else []
