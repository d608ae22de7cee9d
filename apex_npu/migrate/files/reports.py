# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reports: text, csv, json, SARIF 2.1.0, and a unified diff."""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import PurePath

from apex_npu.migrate.engine.program import Finding, count
from apex_npu.migrate.engine.source import Source
from apex_npu.migrate.rewriting import rewrite
from apex_npu.migrate.rules.catalogue import RULES, Rule

from .planning import Plan

_LEVELS = {"refused": "error", "unsure": "warning", "changed": "note", "note": "note", "kept": "none"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
# The first columns are those of the list of changes that Ascend's tool writes.
_COLUMNS = ("path", "line", "end_line", "status", "message")


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line for each finding."""
    _, rows = table(findings)
    width = min(max((len(place) for place, *_ in rows), default=0), 40)
    return [f"{place:{width}}  {rule} {status:7}  {what}" for place, rule, status, what in rows]


def table(findings: Sequence[Finding]) -> tuple[tuple[str, ...], list[tuple[str, str, str, str]]]:
    """Return the content of ``lines`` as column names and cells."""
    places = [f"{_printable(one.path)}:{one.line}:{one.column}" for one in findings]
    rows = [(place, one.rule, one.status, _what(one)) for place, one in zip(places, findings, strict=True)]
    return ("place", "rule", "status", "what"), rows


def _what(finding: Finding) -> str:
    if finding.after is None:
        before = f"{_shown(finding.before)}: " if finding.rule in ("D103", "D104", "D154", "X250") else ""
        return _printable(before + finding.message)
    change = f"{_shown(finding.before)} -> {_shown(finding.after)}" if finding.before else f"+ {_shown(finding.after)}"
    return _printable(change + (f"  {finding.message}" if finding.message else ""))


def _shown(text: str) -> str:
    return " ".join(text.split())[:100]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def summary(plan: Plan, *, written: bool) -> str:
    """Return the last line of a report."""
    found = plan.findings
    changed = count(found, "changed")
    did = "changed" if written else "would change"
    counts = {status: count(found, status) for status in ("refused", "unsure", "kept")}
    left = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    text = f"{plan.read} files read, {len(plan.files)} {did}: {changed} changes; left for you: {left or 'nothing'}; "
    text += f"{count(found, 'note')} notes."
    return text + ("  Next: --diff, then --write" if plan.files and not written else "")


def unified_diff(plan: Plan) -> str:
    """Return the changes in the format of ``diff -u``."""
    pieces = []
    for change in plan.files:
        old, new = (Source(data).text.splitlines(keepends=True) for data in (change.before, change.after))
        shown = change.target.shown
        for line in difflib.unified_diff(old, new, shown, shown):
            pieces.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(pieces)


def write_report(path: str, findings: Sequence[Finding]) -> bytes:
    """Return the content of a report file in the format of its suffix."""
    formats = {".csv": _csv, ".json": _json, ".sarif": _sarif}
    suffix = PurePath(path).suffix
    if suffix not in formats:
        raise ValueError(f"{path} has no known format: a report ends with {', '.join(formats)}")
    return formats[suffix](findings).encode("utf-8", "backslashreplace")


def _csv(findings: Sequence[Finding]) -> str:
    columns = [*_COLUMNS, *(one.name for one in fields(Finding) if one.name not in _COLUMNS)]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    for finding in findings:
        # Spreadsheets take a cell that begins with one of these for a formula.
        cells = asdict(finding).items()
        writer.writerow({name: f"'{one}" if str(one).startswith((*"=+-@\t",)) else one for name, one in cells})
    return file.getvalue()


def _json(findings: Sequence[Finding]) -> str:
    return json.dumps([asdict(finding) for finding in findings], indent=1) + "\n"


def _sarif(findings: Sequence[Finding]) -> str:
    used = [RULES[name] for name in sorted({finding.rule for finding in findings})]
    rules = [{"id": rule.id, "shortDescription": {"text": rule.title}} for rule in used]
    driver = {"name": "apex_npu migrate", "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": [_result(f) for f in findings]}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _result(finding: Finding) -> dict[str, object]:
    region = {"startLine": finding.line, "startColumn": finding.column}
    region |= {"endLine": finding.end_line, "endColumn": finding.end_column}
    artifact = {"uri": PurePath(finding.path).as_posix()}
    result: dict[str, object] = {
        "ruleId": finding.rule,
        "level": _LEVELS[finding.status],
        "message": {"text": _what(finding) or RULES[finding.rule].title},
        "locations": [{"physicalLocation": {"artifactLocation": artifact, "region": region}}],
    }
    if finding.after is not None:
        replacement = {"deletedRegion": region, "insertedContent": {"text": finding.after}}
        changes = [{"artifactLocation": artifact, "replacements": [replacement]}]
        result["fixes"] = [{"description": {"text": RULES[finding.rule].title}, "artifactChanges": changes}]
    return result


def explanation(rule: Rule) -> str:
    """Return a description of a rule: its example, the report on it, and what else it refuses."""
    rewritten = rewrite(rule.example.encode(), options=rule.options)
    assert isinstance(rewritten.source, bytes)
    new = rewritten.source.decode()
    found = [one for one in rewritten.findings if one.rule == rule.id and one.message]
    lines = [f"{rule.id}: {rule.title}", *([_indented(rule.example)] if rule.example else [])]
    lines += ["becomes", _indented(new)] if new != rule.example else []
    lines += [f"{one.status}: {one.message}" for one in found]
    lines += ["It refuses:\n" + "\n".join(f"- {one}" for one in rule.refused)] if rule.refused else []
    return "\n\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
