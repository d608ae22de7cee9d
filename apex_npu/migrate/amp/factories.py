# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Functions that make an optimizer for another file of the program: ``amp.initialize`` is called where they make it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from apex_npu.migrate.engine.findings import Finding
from apex_npu.migrate.engine.source import Source, UnreadableError

_LOOPS = (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def factories(programs: Mapping[Path, bytes], findings: Mapping[Path, Sequence[Finding]]) -> frozenset[str]:
    """``module.function`` of those that get ``amp.initialize``, return its optimizer, and are called once.

    Args:
        programs: The files that can import one another.
        findings: What the rules have said of them.
    """
    places = {path: [one for one in found if _is_initialize(one)] for path, found in findings.items()}
    makers = [
        (path, maker) for path, found in places.items() for one in found for maker in _makers(programs[path], one)
    ]
    if not makers:
        return frozenset()
    calls = [name for data in programs.values() for name in _calls(data)]
    return frozenset(f"{path.stem}.{maker}" for path, maker in makers if calls.count(maker) == 1)


def _is_initialize(finding: Finding) -> bool:
    return (finding.rule, finding.status) == ("A301", "changed")


def _makers(data: bytes, finding: Finding) -> Iterator[str]:
    """The function of a module around an ``amp.initialize``, if it returns nothing but that optimizer."""
    targets = (finding.after or "").partition(" = ")[0].split(", ")
    for node in Source(data).parse().body:
        if isinstance(node, ast.FunctionDef) and node.lineno <= finding.line <= (node.end_lineno or 0):
            returned = {ast.unparse(one.value) for one in ast.walk(node) if isinstance(one, ast.Return) and one.value}
            if len(returned) == 1 and targets[-1].strip() in returned:
                yield node.name


def _calls(data: bytes) -> Iterator[str]:
    """The last names of what is called; of what is called in loops several times."""
    try:
        tree = Source(data).parse()
    except UnreadableError:
        return
    for around in ast.walk(tree):
        if around is tree or isinstance(around, _LOOPS):
            for node in ast.walk(around):
                if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                    yield node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
