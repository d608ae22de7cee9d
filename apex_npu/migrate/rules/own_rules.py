# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A person's rules (``--rules``, ``--api-list``), read from TOML or JSON, of our form or Ascend's.

A file is checked as a whole: what is wrong in it is named with its place before any program is read.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_NAME = re.compile(r"\.?[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Rename:
    """A name, by its imports, is another; with a dot before it: methods of that name, of any object."""

    old: str
    new: str


@dataclass(frozen=True)
class Argument:
    """An argument that calls give is another; it is left out where they do not give it."""

    call: str
    new: str
    position: int | None = None
    keyword: str | None = None


@dataclass(frozen=True)
class Refuse:
    """A name whose uses are left for a person. ``listed``: it is of a list of APIs that are not supported."""

    name: str
    why: str
    listed: bool = False


@dataclass(frozen=True)
class Keep:
    """A name that no rule changes."""

    name: str


OwnRule = Rename | Argument | Refuse | Keep
_KINDS: dict[str, type[OwnRule]] = {"rename": Rename, "argument": Argument, "refuse": Refuse, "keep": Keep}
# Rules of Ascend's form: the kind, and what their keys are called here.
_ASCEND = {
    "ArgsModifyRule": ("argument", {"func_name": "call", "arg_idx": "position", "arg_new": "new"}),
    "FuncNameModifyRule": ("rename", {"old_name": "old", "new_name": "new"}),
    "ModuleNameModifyRule": ("rename", {"old_name": "old", "new_name": "new", "parent_module": "parent"}),
}


class RuleError(ValueError):
    """A file of rules that cannot be used: the file, the place, what is wrong, the way out."""


def read_rules(path: str) -> tuple[OwnRule, ...]:
    """The rules of a file.

    Raises:
        RuleError: It cannot be read, or is not of one of the forms.

    Example::

        >>> read_rules("rules.toml")
        (Rename(old='mylib.to_cuda', new='mylib.to_npu'),)
    """
    tables = _load(path, toml=True)
    if isinstance(tables, dict) and set(tables) == {"rules"} and isinstance(tables["rules"], dict):
        tables = tables["rules"]
    if not isinstance(tables, dict):
        raise RuleError(f"{path}: it has no tables: write [[rename]], [[argument]], [[refuse]] or [[keep]]")
    return tuple(rule for name, entries in tables.items() for rule in _table(path, name, entries))


def read_api_list(path: str) -> tuple[OwnRule, ...]:
    """The names of a list of APIs that are not supported, ``{"op_list": {"torch.nn.X": "why"}}`` or ``["torch.nn.X"]``.

    Raises:
        RuleError: It cannot be read, or has another form.
    """
    read = _load(path, toml=False)
    listed = read.get("op_list") if isinstance(read, dict) else read
    if isinstance(listed, list):
        listed = dict.fromkeys(map(str, listed), "")
    if not isinstance(listed, dict):
        raise RuleError(f'{path}: it has no "op_list": a list is {{"op_list": {{"torch.nn.X": "why"}}}}')
    found = []
    for name, why in listed.items():
        _check_name(f"{path}: op_list", "name", name)
        found.append(Refuse(name, why if isinstance(why, str) else "", listed=True))
    return tuple(found)


def _load(path: str, *, toml: bool) -> Any:
    is_toml = toml and Path(path).suffix == ".toml"
    if toml and Path(path).suffix not in (".toml", ".json"):
        raise RuleError(f"{path}: rules are in a file that ends with .toml or .json")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RuleError(f"{path}: it cannot be read ({error})") from None
    try:
        return _toml(path).loads(text) if is_toml else json.loads(text)
    except RecursionError:
        raise RuleError(f"{path}: it is nested too deeply") from None
    except RuleError:
        raise
    except ValueError as error:
        raise RuleError(f"{path}: it is no {'TOML' if is_toml else 'JSON'}: {error}") from None


def _toml(path: str) -> Any:
    try:
        return importlib.import_module("tomllib")
    except ImportError:
        raise RuleError(f"{path}: reading TOML needs Python 3.11; write the same rules as JSON") from None


def _table(path: str, name: str, entries: Any) -> Iterator[OwnRule]:
    kind, keys = _ASCEND.get(name, (name, {}))
    if kind not in _KINDS:
        known = ", ".join([*_KINDS, *_ASCEND])
        raise RuleError(f"{path}: there are no rules {name!r}; there are {known}")
    if not isinstance(entries, list):
        raise RuleError(f"{path}: {name} is no list of rules: write [[{name}]], or in JSON a list")
    for number, entry in enumerate(entries, 1):
        place = f"{path}: {name} number {number}"
        if not isinstance(entry, dict):
            raise RuleError(f"{place} is no table of keys and values")
        yield _rule(place, kind, entry, keys)


def _rule(place: str, kind: str, entry: Mapping[str, Any], keys: Mapping[str, str]) -> OwnRule:
    made = _KINDS[kind]
    names = {one.name for one in fields(made)} - {"listed"}
    known = [*keys] or sorted(names)
    given: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in known:
            raise RuleError(f"{place}: there is no key {key!r}; there are {', '.join(known)}")
        given[keys.get(key, key)] = value
    parent = given.pop("parent", "")
    for name in sorted({"old", "new", "call", "name", "why"} & names - given.keys()):
        shown = next((key for key, ours in keys.items() if ours == name), name)
        raise RuleError(f"{place}: the key {shown!r} is missing")
    for name, value in given.items():
        wanted = int if name == "position" else str
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise RuleError(f"{place}: {name} is {value!r}, and has to be {'a number' if wanted is int else 'a text'}")
    if keys and kind == "rename":
        given = {name: _ascends(given[name], parent) for name in ("old", "new")}
    for name in {"old", "call", "name"} & given.keys():
        _check_name(place, name, given[name])
    if kind == "rename":
        _check_name(place, "new", given["new"])
        if given["old"].startswith(".") != given["new"].startswith("."):
            raise RuleError(f"{place}: old and new are both methods (with a dot before them), or neither is")
        if f"{given['new']}.".startswith(f"{given['old']}."):
            raise RuleError(f"{place}: new begins with old: a second run would change it again")
    if kind == "argument":
        _check_argument(place, given)
    return made(**given)


def _ascends(name: str, parent: str) -> str:
    """A name of Ascend's rules: a module below its parent, or a function; one without a module is a method."""
    if parent:
        return f"{parent}.{name}"
    return name if "." in name else f".{name}"


def _check_argument(place: str, given: Mapping[str, Any]) -> None:
    if ("position" in given) == ("keyword" in given):
        raise RuleError(f"{place}: give one of position and keyword")
    if given.get("position", 0) < 0:
        raise RuleError(f"{place}: position is {given['position']}, and counts from 0")
    try:
        ast.parse(given["new"].strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        raise RuleError(f"{place}: new is {given['new']!r}, which is no Python expression") from None


def _check_name(place: str, key: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise RuleError(f"{place}: {key} is {name!r}, which is no name such as mylib.function, or .method")
