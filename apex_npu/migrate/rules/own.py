# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The user's own rules (``--rules``, ``--api-list``), read from TOML or JSON in this package's form or Ascend's.

A file is checked as a whole before any program is read; an error names the place. In a span with a report of these
rules, other rules report nothing.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.source import Edit

from .targets import replaced

_NAME = re.compile(r"\.?[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class OwnRule:
    """A rule of the user for ``name``: the full name of an import or, with a dot before it, the name of a method."""

    name: str

    def __post_init__(self) -> None:
        _check_name(self.name)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a name must be written as mylib.function or .method, got {name!r}")


@dataclass(frozen=True)
class Rename(OwnRule):
    """Rename ``name`` to ``new``."""

    new: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_name(self.new)
        if self.name.startswith(".") != self.new.startswith("."):
            raise ValueError("old and new are both methods (with a dot before them), or neither is")
        if f"{self.new}.".startswith(f"{self.name}."):
            raise ValueError("new begins with old: a second run would change it again")

    @property
    def is_beside(self) -> bool:
        """True if both names are in the same module."""
        return self.name.rpartition(".")[0] == self.new.rpartition(".")[0]


@dataclass(frozen=True)
class Argument(OwnRule):
    """Replace the value that calls of ``name`` pass for an argument. Calls that do not pass it stay the same."""

    new: str
    position: int | None = None
    keyword: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.position is None) == (self.keyword is None):
            raise ValueError("give one of position and keyword")
        if self.position is not None and (type(self.position) is not int or self.position < 0):
            raise ValueError(f"position must be an integer of at least 0, got {self.position!r}")
        try:
            ast.parse(self.new.strip(), mode="eval")
        except (AttributeError, SyntaxError, ValueError, RecursionError):
            raise ValueError(f"new must be a Python expression, got {self.new!r}") from None


@dataclass(frozen=True)
class Refuse(OwnRule):
    """Refuse all uses of a name. ``listed`` is True if it comes from ``--api-list``."""

    why: str
    listed: bool = False


@dataclass(frozen=True)
class Keep(OwnRule):
    """Change no use of a name."""


# The rules for rewriting the examples of R801 to R804 and D170.
EXAMPLES: tuple[OwnRule, ...] = (
    Rename("mylib.to_cuda", "mylib.to_npu"),
    Argument("torch.utils.data.DataLoader", "False", keyword="pin_memory"),
    Refuse("mylib.kernel", "it is written in CUDA"),
    Keep("torch.cuda.empty_cache"),
    Refuse("torch.nn.Fold", "it has no kernel", listed=True),
)
# The tables of a file: the kind of their rules, and the field for each key. The last three have Ascend's form.
_TABLES: dict[str, tuple[type[OwnRule], dict[str, str]]] = {
    "rename": (Rename, {"new": "new", "old": "name"}),
    "argument": (Argument, {"call": "name", "keyword": "keyword", "new": "new", "position": "position"}),
    "refuse": (Refuse, {"name": "name", "why": "why"}),
    "keep": (Keep, {"name": "name"}),
    "ArgsModifyRule": (Argument, {"func_name": "name", "arg_idx": "position", "arg_new": "new"}),
    "FuncNameModifyRule": (Rename, {"old_name": "name", "new_name": "new"}),
    "ModuleNameModifyRule": (Rename, {"old_name": "name", "new_name": "new", "parent_module": "parent"}),
}
_OPTIONAL = ("keyword", "position", "parent_module")


def read_rules(path: str) -> tuple[OwnRule, ...]:
    """Return the rules of a file.

    Raises:
        ValueError: The file cannot be read, or has neither form.
    """
    if Path(path).suffix not in (".toml", ".json"):
        raise ValueError(f"{path}: a file of rules must end with .toml or .json")
    tables = _load(path)
    if isinstance(tables, dict) and set(tables) == {"rules"} and isinstance(tables["rules"], dict):
        tables = tables["rules"]
    if not isinstance(tables, dict):
        raise ValueError(f"{path}: it has no tables: write [[rename]], [[argument]], [[refuse]] or [[keep]]")
    rules = []
    for name, entries in tables.items():
        if name not in _TABLES:
            raise ValueError(f"{path}: unknown rules {name!r}; allowed are {', '.join(_TABLES)}")
        if not isinstance(entries, list):
            raise ValueError(f"{path}: {name} must be a list of rules: write [[{name}]], or in JSON a list")
        rules += [_rule(f"{path}: {name} number {number}", name, entry) for number, entry in enumerate(entries, 1)]
    return tuple(rules)


def read_api_list(path: str) -> tuple[OwnRule, ...]:
    """Return rules that refuse the names in a file: ``{"op_list": {"torch.nn.X": "why"}}`` or ``["torch.nn.X"]``.

    Raises:
        ValueError: The file cannot be read, or has another form.
    """
    read = _load(path)
    listed = read.get("op_list") if isinstance(read, dict) else read
    if isinstance(listed, list):
        listed = dict.fromkeys(map(str, listed), "")
    if not isinstance(listed, dict):
        raise ValueError(f'{path}: it has no "op_list": a list is {{"op_list": {{"torch.nn.X": "why"}}}}')
    try:
        return tuple(Refuse(name, why if isinstance(why, str) else "", listed=True) for name, why in listed.items())
    except ValueError as error:
        raise ValueError(f"{path}: op_list: {error}") from None


def _load(path: str) -> Any:
    form = "toml" if path.endswith(".toml") else "json"
    try:
        loads = importlib.import_module("tomllib" if form == "toml" else form).loads
        return loads(Path(path).read_text(encoding="utf-8"))
    except ImportError:
        raise ValueError(f"{path}: reading TOML needs Python 3.11; write the same rules as JSON") from None
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path}: it cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: it is not valid {form.upper()}: {error}") from None


def _rule(place: str, table: str, entry: Any) -> OwnRule:
    if not isinstance(entry, dict):
        raise ValueError(f"{place} must be a table of keys and values")
    kind, names = _TABLES[table]
    unknown = [key for key in entry if key not in names]
    if unknown:
        raise ValueError(f"{place}: unknown key {unknown[0]!r}; allowed are {', '.join(names)}")
    missing = [key for key in names if key not in entry and key not in _OPTIONAL]
    if missing:
        raise ValueError(f"{place}: the key {missing[0]!r} is missing")
    for key, value in entry.items():
        if names[key] != "position" and not isinstance(value, str):
            raise ValueError(f"{place}: {key} must be a string, got {value!r}")
    given = {names[key]: value for key, value in entry.items()}
    parent = given.pop("parent", "")
    if table.endswith("NameModifyRule"):  # a module below its parent, or a function; one without a module is a method
        for name in ("name", "new"):
            if parent or "." not in given[name]:
                given[name] = f"{parent}.{given[name]}"
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def concerns(data: bytes, rules: tuple[OwnRule, ...]) -> bool:
    """Return whether a file contains the name of one of ``rules``."""
    return any(rule.name.rpartition(".")[2].encode() in data for rule in rules)


def check(program: Program) -> None:
    """Report what the user's rules find, and drop what other rules report in the same spans."""
    apply: dict[type[OwnRule], Any] = {Rename: _rename, Argument: _argument, Refuse: _refuse, Keep: _keep}
    for rule in program.options.own:
        before = len(program.drafts)
        apply[type(rule)](program, rule)
        own = program.drafts[before:]
        others = [draft for draft in program.drafts[:before] if draft.rule[0] != "R"]
        gone = [one for one in others if any(one.start < each.end and each.start < one.end for each in own)]
        left = [draft for draft in program.drafts if draft not in gone]
        rest = {link for draft in left if draft.status == "changed" and draft.edits for link in draft.links}
        rest -= {link for draft in own for link in draft.links}
        # Changes that are linked to a dropped one are refused.
        broken = [one for one in gone if one.links & rest and one.status != "note"]
        program.drafts = left + [one.refused("a rule of --rules changes a part of it") for one in broken]


def _uses(program: Program, name: str) -> Iterator[tuple[ast.Name | ast.Attribute, tuple[int, int]]]:
    """Yield the uses of ``name``, or of an imported part of it, with their spans. ``.name`` is a call of a method."""
    for node in program.loaded():
        dotted = program.dotted(node)
        if name.startswith("."):
            if program.call_of(node) and isinstance(node, ast.Attribute) and node.attr == name[1:]:
                yield node, program.method_span(node)
        elif dotted == name or (isinstance(node, ast.Name) and dotted.startswith(f"{name}.")):
            yield node, program.source.span(node)


def _imports(program: Program, name: str) -> Iterator[tuple[ast.alias | ast.ImportFrom, str]]:
    """Yield the imports of ``name`` or of a part of it, with the full name of what they import."""
    for node in program.every(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from ((one, one.name) for one in node.names if f"{one.name}.".startswith(f"{name}."))
        elif not node.level:
            module = node.module or ""
            if f"{module}.".startswith(f"{name}."):
                yield node, module
            else:
                yield from ((one, name) for one in node.names if f"{module}.{one.name}" == name)


def _keep(program: Program, rule: Keep) -> None:
    places = [span for _, span in _uses(program, rule.name)]
    places += [program.source.span(node) for node, _ in _imports(program, rule.name)]
    for start, end in places:
        kept = [one for one in program.drafts if one.start < end and start < one.end and one.status != "note"]
        if kept:
            links = frozenset().union(*(one.links for one in kept))
            program.report("R804", "kept", (start, end), message="a rule of --rules keeps it", links=links)


def _refuse(program: Program, rule: Refuse) -> None:
    places = [span for _, span in _uses(program, rule.name)]
    for node, name in _imports(program, rule.name):
        if name != rule.name or isinstance(program.parent(node), ast.Import) or isinstance(node, ast.ImportFrom):
            places.append(program.source.span(node))
    reason = "is in the list of APIs that are not supported" if rule.listed else "is refused by a rule of --rules"
    message = f"{rule.name.removeprefix('.')} {reason}" + (f": {rule.why}" if rule.why else "")
    for place in places:
        program.refuse("D170" if rule.listed else "R803", place, message)


def _argument(program: Program, rule: Argument) -> None:
    new = ast.unparse(ast.parse(rule.new.strip(), mode="eval"))
    for node, _ in _uses(program, rule.name):
        call = program.call_of(node)
        if call is None:
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
    links, last = [f"own {rule.name}"], rule.new.rpartition(".")[2]
    is_method = rule.name.startswith(".")
    for node, span in _uses(program, rule.name):
        if isinstance(node, ast.Name):
            continue  # the import is changed instead
        if is_method or (rule.is_beside and node.attr == rule.name.rpartition(".")[2]):
            program.report("R801", "changed", span, [program.rename(node, last)], links=links)
        else:
            _replace(program, node, rule, links)
    for imported, name in () if is_method else _imports(program, rule.name):
        _rename_import(program, imported, name, rule, links)


def _rename_import(
    program: Program, node: ast.alias | ast.ImportFrom, name: str, rule: Rename, links: list[str]
) -> None:
    """Rename the import of ``name``, which is ``rule.name`` or a name below it."""
    statement, below, refusal = program.parent(node), rule.new + name[len(rule.name) :], ""
    module, _, last = rule.new.rpartition(".")
    if isinstance(node, ast.ImportFrom):  # from old import x
        program.report("R801", "changed", node, [program.rename_module(node, below)], links=links)
        return
    asname = node.asname or node.name
    if isinstance(statement, ast.ImportFrom):  # from module import old: the program keeps its name
        written = f"{last} as {asname}" if asname != last else last
        edit = Edit(*program.source.span(node), written)
        if not rule.is_beside:
            edit = Edit(*program.source.span(statement), f"from {module} import {written}")
            refusal = "" if len(statement.names) == 1 and module else "import it by a statement of its own"
    elif node.asname or "." not in name:  # import old, import old.part as name
        edit = Edit(*program.source.span(node), f"{below} as {asname}")
    else:  # import old.part
        edit = Edit(*program.source.span(node), below)
        if not rule.is_beside or "." not in rule.name:
            refusal = f"import it under a name (as), so that {below} can replace it"
    place = node if refusal else (edit.start, edit.end)
    program.report("R801", "changed", place, [edit], links=links, refusal=refusal)


def _replace(program: Program, node: ast.Attribute, rule: Rename, links: list[str]) -> None:
    """Replace a use by the name in another module, and add an import of that module unless the program has one."""
    module = rule.new.rpartition(".")[0]
    root = module.partition(".")[0]
    bound = program.names.module.bindings.get(root, [])
    imports = [one for one in program.tree.body if isinstance(one, (ast.Import, ast.ImportFrom))]
    lines = (one for one in imports if getattr(one, "module", "") != "__future__" and program.has_own_lines(one))
    anchor = next(lines, None)
    taken = any(one not in (root, module) for one in bound) or (not bound and program.names.is_taken(root))
    is_left = not module or taken or (not bound and anchor is None)
    refusal = f"import {module or rule.new} at the top level first" if is_left else ""
    edit = program.rename(node, "") and replaced(program, node, rule.new)
    program.report("R801", "changed", node, [edit], links=links, refusal=refusal)
    if edit and not refusal and not bound and anchor is not None:
        program.names.module.bindings[root] = [root]
        program.change("R801", program.lines(anchor, [f"import {module}"]), links=links)
