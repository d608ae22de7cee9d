# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Applies a person's rules (``own_rules.py``). Where they say something, no other rule does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import alone

from .catalogue import RULES
from .own_rules import Argument, Keep, OwnRule, Refuse, Rename
from .targets import replaced

_PART = "a rule of --rules changes a part of it"
_FROM = re.compile(r"from[ \t\f]+([\w.]+)(?![\w.])")


def concerns(data: bytes, rules: tuple[OwnRule, ...]) -> bool:
    """Whether a file has a name that one of ``rules`` is about."""
    return any(_name_of(rule).rpartition(".")[2].encode() in data for rule in rules)


def _name_of(rule: OwnRule) -> str:
    return rule.old if isinstance(rule, Rename) else rule.call if isinstance(rule, Argument) else rule.name


def check(program: Program) -> None:
    """Say what they find, and forget what other rules say of the same places."""
    for rule in program.options.own:
        before = len(program.drafts)
        if isinstance(rule, Rename):
            _rename(program, rule)
        elif isinstance(rule, Argument):
            _argument(program, rule)
        elif isinstance(rule, Refuse):
            _refuse(program, rule)
        else:
            _keep(program, rule)
        spans = [(draft.start, draft.end) for draft in program.drafts[before:]]
        others = [draft for draft in program.drafts[:before] if draft.rule[0] != "R"]
        gone = [one for one in others if any(one.start < end and start < one.end for start, end in spans)]
        left = [draft for draft in program.drafts if draft not in gone]
        rest = {link for draft in left if draft.status == "changed" and draft.edits for link in draft.links}
        rest -= {link for draft in program.drafts[before:] for link in draft.links}
        # The rest of what is changed together is not changed without it.
        broken = [one for one in gone if one.links & rest and one.status != "note"]
        program.drafts = left + [replace(one, status="refused", edits=(), message=_PART) for one in broken]


def _uses(program: Program, name: str) -> Iterator[ast.Name | ast.Attribute]:
    """Where a name is used: the node that is this name, or a name for something in it; a method that is called."""
    for node in program.names.nodes:
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            continue
        dotted = program.names.dotted(node) or ""
        if name.startswith("."):
            parent = program.parent(node)
            called = isinstance(parent, ast.Call) and parent.func is node
            if called and isinstance(node, ast.Attribute) and node.attr == name[1:]:
                yield node
        elif dotted == name or (isinstance(node, ast.Name) and dotted.startswith(f"{name}.")):
            yield node


def _imports(program: Program, name: str) -> Iterator[tuple[ast.alias | ast.ImportFrom, str]]:
    """Where a name, or something in it, is imported, with the full name."""
    for node in program.names.nodes:
        if isinstance(node, ast.Import):
            yield from ((one, one.name) for one in node.names if f"{one.name}.".startswith(f"{name}."))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if f"{module}.".startswith(f"{name}."):
                yield node, module
            else:
                yield from ((one, name) for one in node.names if f"{module}.{one.name}" == name)


def _span(program: Program, node: ast.Name | ast.Attribute, name: str) -> tuple[int, int]:
    """The span of a name, or of the dot and the name of a method."""
    if name.startswith(".") and isinstance(node, ast.Attribute):
        return program.method_span(node)
    return program.source.span(node)


def _keep(program: Program, rule: Keep) -> None:
    places = [_span(program, node, rule.name) for node in _uses(program, rule.name)]
    places += [program.source.span(node) for node, _ in _imports(program, rule.name)]
    for start, end in places:
        kept = [one for one in program.drafts if one.start < end and start < one.end and one.status != "note"]
        if kept:
            links = frozenset().union(*(one.links for one in kept))
            program.report("R804", "kept", (start, end), message=RULES["R804"].message, links=links)


def _refuse(program: Program, rule: Refuse) -> None:
    listed = "D170" if rule.listed else "R803"
    message = RULES[listed].message.format(rule.name.removeprefix(".")) + (f": {rule.why}" if rule.why else "")
    places = [_span(program, node, rule.name) for node in _uses(program, rule.name)]
    for node, name in _imports(program, rule.name):
        if name != rule.name or isinstance(program.parent(node), ast.Import) or isinstance(node, ast.ImportFrom):
            places.append(program.source.span(node))
    for place in places:
        program.report(listed, "refused", place, message=message)


def _argument(program: Program, rule: Argument) -> None:
    new = ast.unparse(ast.parse(rule.new.strip(), mode="eval"))
    for node in _uses(program, rule.call):
        call = program.parent(node)
        if not isinstance(call, ast.Call) or call.func is not node:
            continue
        if rule.position is None:
            given = next((one.value for one in call.keywords if one.arg == rule.keyword), None)
        else:
            first = call.args[: rule.position + 1]
            told = len(first) > rule.position and not any(isinstance(one, ast.Starred) for one in first)
            given = first[-1] if told else None
        if given is not None and ast.unparse(given) != new:
            program.report("R802", "changed", given, [replaced(program, given, rule.new.strip())])


def _rename(program: Program, rule: Rename) -> None:
    links = [f"own {rule.old}"]
    new_module, _, last = rule.new.rpartition(".")
    beside = rule.old.rpartition(".")[0] == new_module
    for node in _uses(program, rule.old):
        if isinstance(node, ast.Name):
            continue  # its import is changed
        span = _span(program, node, rule.old)
        if rule.old.startswith(".") or (beside and node.attr == rule.old.rpartition(".")[2]):
            program.report("R801", "changed", span, [program.rename(node, last)], links=links)
        elif program.rename(node, "") is None:
            program.report("R801", "changed", span, [None], links=links)
        else:
            _replace(program, node, rule, links)
    for at, name in [] if rule.old.startswith(".") else _imports(program, rule.old):
        if isinstance(at, ast.ImportFrom):
            _rename_module(program, at, rule, links)
        elif isinstance(program.parent(at), ast.Import):
            _rename_import(program, at, name, rule, links)
        else:
            _rename_imported(program, at, rule, links, beside=beside)


def _replace(program: Program, node: ast.Attribute, rule: Rename, links: list[str]) -> None:
    """A name of another module, which is imported where it is not yet."""
    module = rule.new.rpartition(".")[0]
    root = module.partition(".")[0]
    bound = program.names.module.bindings.get(root, [])
    imports = [one for one in program.tree.body if isinstance(one, (ast.Import, ast.ImportFrom))]
    anchor = next((one for one in imports if getattr(one, "module", "") != "__future__" and alone(program, one)), None)
    taken = any(one not in (root, module) for one in bound) or (not bound and program.names.is_taken(root))
    if not module or taken or (not bound and anchor is None):
        program.report(
            "R801", "refused", node, message=f"import {module or rule.new} at the top level first", links=links
        )
        return
    program.report("R801", "changed", node, [replaced(program, node, rule.new)], links=links)
    if not bound and anchor is not None:
        program.names.module.bindings[root] = [root]
        edit = program.lines(anchor, [f"import {module}"])
        program.report("R801", "changed", (edit.start, edit.end), [edit], links=links)


def _rename_module(program: Program, node: ast.ImportFrom, rule: Rename, links: list[str]) -> None:
    """``from old import x``: names that are imported from a module of another name."""
    found = _FROM.match(program.source.text, *program.source.span(node))
    new = rule.new + (node.module or "")[len(rule.old) :]
    edit = Edit(*found.span(1), new) if found else None
    program.report("R801", "changed", node, [edit], links=links)


def _rename_import(program: Program, alias: ast.alias, name: str, rule: Rename, links: list[str]) -> None:
    """``import old``, ``import old.part as name``."""
    new = rule.new + name[len(rule.old) :]
    plain = alias.asname is None and "." not in name
    beside = rule.old.rpartition(".")[0] == rule.new.rpartition(".")[0] and "." in rule.old
    if alias.asname is None and not plain and not beside:
        message = f"give it a name by as, for {new} to take its place"
        program.report("R801", "refused", alias, message=message, links=links)
        return
    asname = name if plain else alias.asname
    edit = Edit(*program.source.span(alias), f"{new} as {asname}" if asname else new)
    program.report("R801", "changed", alias, [edit], links=links)


def _rename_imported(program: Program, alias: ast.alias, rule: Rename, links: list[str], *, beside: bool) -> None:
    """``from module import old``: the name that it has here stays."""
    module, _, last = rule.new.rpartition(".")
    node, asname = program.parent(alias), alias.asname or alias.name
    assert isinstance(node, ast.ImportFrom)
    if not beside and (len(node.names) > 1 or not module):
        message = "import it by a statement of its own, for that to be changed"
        program.report("R801", "refused", alias, message=message, links=links)
        return
    named = asname if asname != last else None
    written = f"{last} as {asname}" if named else last
    span = program.source.span(alias if beside else node)
    edit = Edit(*span, written if beside else f"from {module} import {written}")
    program.report("R801", "changed", span, [edit], links=links)
