# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``rewrite``: all rules on one program. What is not in a reported span stays as it is, and the result is checked."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from . import advice, amp, apex, data_parallel, device, fused, own, similar, strings, unused
from .findings import Finding
from .ours import missing_imports, torch_import
from .program import Draft, Options, Program
from .rules import RULES
from .source import Edit, Source, UnreadableError
from .tables import TRAINERS
from .targets import target_of, torch_name

__all__ = ["TRIGGER", "Rewritten", "rewrite"]

# A file without any of these has nothing for the rules for devices and apex.
TRIGGER = re.compile(
    rb"cuda|CUDA|nccl|NCCL|apex|amp_C|change_data_ptr|DataParallel|data_parallel|backends\.cudnn|flash_attn|xformers"
    rb"|bitsandbytes|cupy|pynvml|tensorrt|torch2trt|transformer_engine|nvidia\.dali"
)
# Likewise for those for optimizers and amp.
_TRAINING = re.compile(
    rb"optim|backward|autocast|torch\.save|GradScaler|fully_shard|FullyShard|" + b"|".join(map(str.encode, TRAINERS))
)
# And for advice.
_ADVICE = re.compile(rb"DataLoader|\.long\b|int64|channels_last")
# What may define a name, that rules rename, as the program's own.
_DEFINES = re.compile(rb"\bis_cuda\s*[:=]|\bdef\s+(is_)?cuda\b|[\"']-{1,2}is[-_]cuda")
_FAMILIES: tuple[Callable[[Program], None], ...] = (
    *(
        device.check,
        similar.check,
        strings.check,
        apex.check,
        fused.check,
        amp.check,
        data_parallel.check,
        advice.check,
        own.check,
    ),
)
# What brings a name of npu's into the file.
_NPU_NAMES = ("D101", "D102", "D103", "D104", "D105", "D106", "D107", "D108", "D109", "D110", "D111", "D151", "P601")


@dataclass(frozen=True)
class Rewritten:
    r"""A program after the rules.

    Attributes:
        source: The new text, or bytes where bytes were given; the old one where nothing changes.
        findings: What was changed, refused and noted, in the order of the file.

    Example::

        >>> migrate.rewrite("import torch\nx = torch.ones(2).cuda()").source.splitlines()[-1]
        'x = torch.ones(2).npu()'
    """

    source: str | bytes
    findings: tuple[Finding, ...]


def rewrite(source: str | bytes, path: str = "train.py", options: Options | None = None) -> Rewritten:
    """Apply the rules to one Python program. Nothing is executed or written.

    Args:
        source: The program; bytes keep their encoding, byte order mark and line ends.
        path: What the findings call it.
        options: Which rules apply, and how.

    Returns:
        The new program and the findings. A program that cannot be read has one finding of the family F.

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
    return rewrite_part(source, path, replace(options, amp_left=left)) if left else rewritten


def concerns(data: bytes, options: Options) -> bool:
    """Whether the rules could have anything to say of a file."""
    return bool(
        options.data_parallel
        or own.concerns(data, options.own)
        or TRIGGER.search(data)
        or (options.has("N702") and _ADVICE.search(data))
        or ((options.amp or options.has("O501")) and _TRAINING.search(data))
    )


def rewrite_part(source: str | bytes, path: str, options: Options) -> Rewritten:
    """``rewrite`` for one file of a program: whether amp is put in as a whole, who calls this finds out."""
    data = source if isinstance(source, bytes) else source.encode("utf-8", "surrogatepass")
    if not concerns(data, options):
        return Rewritten(source, ())
    options = replace(options, owned=options.owned | owned_names(data))
    try:
        program = examined(source, options, path)
        findings = program.findings(path)
        if not program.changes():
            return Rewritten(source, tuple(findings))
        text = program.rewritten()
        new = program.source.encode(text) if isinstance(source, bytes) else text
    except UnreadableError as error:
        return Rewritten(source, (unreadable(path, error.rule, error.reason, error.line),))
    except RecursionError:
        return Rewritten(source, (unreadable(path, "F904", "it is nested too deeply for the rules"),))
    return Rewritten(new, tuple(findings))


def examined(source: str | bytes, options: Options, path: str = "") -> Program:
    """A program with what all rules say of it.

    Raises:
        UnreadableError: It cannot be read.
    """
    program = Program(Source(source), options)
    for check in _FAMILIES:
        check(program)
    program.settle()
    _refuse_gated(program)
    _respect_npu(program)
    amp.drop_covered(program)
    unused.check(program, path)
    _add_first_lines(program)
    return program


def owned_names(data: bytes) -> frozenset[str]:
    """The attributes, of those that rules rename, that a program defines itself: in classes, by ``self.name = ...``."""
    if not _DEFINES.search(data):
        return frozenset()
    try:
        tree = Source(data).parse()
    except UnreadableError:
        return frozenset()
    names: set[object] = set()
    methods: set[object] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods.update(getattr(one, "name", None) for one in node.body)
            assigned = [one for one in node.body if isinstance(one, (ast.Assign, ast.AnnAssign))]
            targets = [target for one in assigned for target in getattr(one, "targets", [getattr(one, "target", None)])]
            names.update(getattr(target, "id", None) for target in targets)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("-"):
            names.add(node.value.lstrip("-").replace("-", "_"))  # args.is_cuda
    return frozenset(name for name in ("cuda", "is_cuda") if name in methods or (name == "is_cuda" and name in names))


def unreadable(path: str, rule: str, reason: str, line: int = 1) -> Finding:
    """The finding of a file that is left as a whole."""
    return Finding(path, line, 1, rule, "refused", line, 1, "", None, reason)


def _refuse_gated(program: Program) -> None:
    """Leave device strings in the arms of a conditional whose test stays as it is."""
    stay = [draft for draft in program.drafts if draft.status in ("refused", "kept") and draft.rule in ("D101", "D151")]
    if not stay:
        return
    for node in program.names.nodes:
        if not isinstance(node, (ast.If, ast.IfExp)):
            continue
        (gate, gate_end), (start, end) = program.source.span(node.test), program.source.span(node)
        cause = next((draft for draft in stay if gate <= draft.start < gate_end), None)
        if cause is None:
            continue
        message = f"its condition stays as it is (line {program.source.place(cause.start)[0]}, {cause.rule})"
        program.drafts = [
            replace(draft, status="refused", edits=(), message=message)
            if draft.rule in ("D105", "D106", "D107") and start <= draft.start < end
            else draft
            for draft in program.drafts
        ]


def _respect_npu(program: Program) -> None:
    """Leave a file that has an npu path of its own: both arms of its conditionals would say npu."""
    changes = [draft for draft in program.drafts if draft.rule[0] == "D" and draft.status in ("changed", "unsure")]
    place = None if program.options.force or not changes else _speaks_of_npu(program)
    if place is None:
        return
    message = RULES["D159"].message.format(program.source.place(place)[0])
    start = changes[0].start
    first = Draft("D159", "refused", start, start, message=f"{message}; {len(changes)} places are left")
    program.drafts = [draft for draft in program.drafts if draft not in changes] + [first]


def _speaks_of_npu(program: Program) -> int | None:
    """Where the program names an NPU in code, as an offset."""
    for node in program.names.nodes:
        names: list[object] = []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name.partition(".")[0] for alias in node.names] if isinstance(node, ast.Import) else []
            names += [(node.module or "").partition(".")[0]] if isinstance(node, ast.ImportFrom) else []
            found = "torch_npu" in names
        elif isinstance(node, ast.Constant):
            found = isinstance(node.value, str) and re.fullmatch(r"npu(:\d+)?", node.value) is not None
        else:
            found = isinstance(node, ast.Attribute) and node.attr in ("npu", "is_npu")
        if found:
            assert isinstance(node, (ast.stmt, ast.expr))
            return program.source.span(node)[0]
    return None


def _add_first_lines(program: Program) -> None:
    """Add the lines that go with the import of torch: after it, or before it where that line needs them already."""
    portable = program.options.to == "portable"
    node = torch_import(program)
    lines: dict[str, list[str]] = {}
    needed = any(draft.rule in _NPU_NAMES for draft in program.changes())
    needed &= portable or program.options.has("D113")
    if needed and not (portable and "ACCELERATOR" in program.names.module.bindings):
        first = min(draft.start for draft in program.changes() if draft.rule in _NPU_NAMES)
        if portable and (node is None or first < program.source.span(node)[1]):
            _leave_all(
                program, "portable code asks torch for the accelerator: import torch at the top level, before this"
            )
        elif node is None:
            program.drafts.append(Draft("D113", "note", first, first, message=RULES["D113"].message))
        else:
            lines["D113"] = [target_of(program).first_line(torch_name(program) or "torch")]
    rules = {draft.rule[0] for draft in program.changes()}
    parts = [part for part, families in (("amp", {"A", "T"}), ("optimizers", {"O"})) if rules & families]
    if parts:
        lines["X202"] = missing_imports(program, parts)
    if any(draft.rule == "P601" for draft in program.changes()) and "os" not in program.names.module.bindings:
        lines["P606"] = ["import os"]
    if node is not None and lines:
        _beside_torch(program, node, lines)


def _leave_all(program: Program, message: str) -> None:
    for number, draft in enumerate(program.drafts):
        if draft.rule in _NPU_NAMES and draft.status in ("changed", "unsure"):
            program.drafts[number] = replace(draft, status="refused", edits=(), message=message)


def _beside_torch(program: Program, node: ast.stmt, lines: dict[str, list[str]]) -> None:
    assert node.end_lineno is not None
    source, first, last = program.source, node.lineno, node.end_lineno
    body = program.tree.body
    used = any(first <= source.place(draft.start)[0] <= last for draft in program.changes())
    index = body.index(node)
    while used and index and (body[index - 1].end_lineno or 0) >= first:
        index -= 1  # a statement of this line comes before
    anchor = body[index]
    while not used and index + 1 < len(body) and body[index + 1].lineno <= last:
        index += 1  # statements of this line come after
        anchor = body[index]
        last = anchor.end_lineno or last
    before = used and program.options.to == "npu"
    offset = source.line_start(anchor.lineno) if before else source.line_end(last)
    newline = source.newline(anchor.lineno if before else last)
    number = 0
    for rule, statements in lines.items():
        edits: list[Edit] = []
        for line in statements:
            number += not before
            text = line + newline if before else newline + line
            edits.append(program.insert(body, anchor, offset, line, text, after=number))
        program.drafts += [Draft(rule, "changed", offset, offset, tuple(edits))] if edits else []
