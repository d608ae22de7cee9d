# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which files are one program, by their imports: amp is put into all files of a program, or into none."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .amp import why_left
from .findings import Finding
from .source import Source, UnreadableError


def left_out(programs: Mapping[Path, bytes], findings: Mapping[Path, Sequence[Finding]]) -> dict[Path, str]:
    """The files that amp is not put into after all, with the reason.

    Args:
        programs: The files that can import one another.
        findings: What the rules have said of them.
    """
    said = {path for path, found in findings.items() if any(finding.rule[0] in "AT" for finding in found)}
    if not said:
        return {}
    imports = {path: set(_imports(path, data, programs)) for path, data in programs.items()}
    imported = set().union(*imports.values())
    reasons: dict[Path, str] = {}
    parts = []
    for path in programs:
        # A file that others import is looked at with them; files that import one another in a ring are all looked at.
        closure = _closure(path, imports)
        own = said & closure
        if own and (path not in imported or path in set().union(*(imports[one] for one in closure))):
            parts.append(own)
            reason = why_left([findings[one] for one in sorted(own)])
            reasons.update(dict.fromkeys(own, reason) if reason else {})
    while grown := [part for part in parts if part & reasons.keys() and part - reasons.keys()]:
        for part in grown:
            reasons.update(dict.fromkeys(part, reasons[min(part & reasons.keys())]))
    return reasons


def with_imports(main: Path, programs: Mapping[Path, bytes]) -> set[Path]:
    """A file and those that it imports, in turn."""
    return _closure(main, {path: set(_imports(path, data, programs)) for path, data in programs.items()})


def _closure(path: Path, imports: Mapping[Path, set[Path]]) -> set[Path]:
    found, todo = {path}, [path]
    while todo:
        new = imports[todo.pop()] - found
        found |= new
        todo.extend(new)
    return found


def _imports(path: Path, data: bytes, programs: Mapping[Path, bytes]) -> Iterator[Path]:
    """The files among ``programs`` that a file imports: from beside it, or from folders around it."""
    try:
        tree = Source(data).parse()
    except UnreadableError:
        return
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        folders = path.parents
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
            folders = path.parents[node.level - 1 : node.level] if node.level else folders
        for name in filter(None, names):
            parts = name.split(".")
            options = (
                at.joinpath(*parts[:-1], end)
                for at in folders
                for end in (f"{parts[-1]}.py", f"{parts[-1]}/__init__.py")
            )
            found = next((option for option in options if option in programs), None)
            if found is not None and found != path:
                yield found
