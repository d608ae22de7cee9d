# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``patch/ERAS.toml``: which Apex there are, and which patch is for which."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import PipelineError

FOLDER = Path(__file__).resolve().with_name("patch")


@dataclass(frozen=True)
class Era:
    """One of the shapes that upstream has had.

    Attributes:
        name: Of its folder in ``patch/``.
        about: A line for people.
        commit: The one that the patch is made from.
        has: Files of which each tree of this era has all.
        lacks: Files of which it has none.
    """

    name: str
    about: str
    commit: str
    has: tuple[str, ...]
    lacks: tuple[str, ...]

    def patch_file(self, folder: Path = FOLDER) -> Path:
        """The path of its patch."""
        return folder / self.name / "npu.patch"

    def matches(self, is_there: Callable[[str], bool]) -> bool:
        """Whether a tree is of this era; ``is_there`` says whether it has a file."""
        return all(map(is_there, self.has)) and not any(map(is_there, self.lacks))


@dataclass(frozen=True)
class Eras:
    """All of them, in the order in which a tree is compared with them."""

    url: str
    default: str
    eras: tuple[Era, ...]

    def named(self, name: str) -> Era | None:
        """The era of this name."""
        return next((era for era in self.eras if era.name == name), None)

    def recognise(self, is_there: Callable[[str], bool]) -> Era | None:
        """The era of a tree."""
        return next((era for era in self.eras if era.matches(is_there)), None)


def parse(text: str) -> dict[str, dict[str, str | list[str]]]:
    """The tables of a file in the part of TOML that ERAS.toml uses; Python 3.10 has no tomllib. Before any: ``""``.

    Raises:
        PipelineError: A line is none of that part.
    """
    tables: dict[str, dict[str, str | list[str]]] = {"": {}}
    table = tables[""]
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(\w+)\]", line):
            table = tables[header[1]] = {}
        elif entry := re.fullmatch(r'(\w+) = (\[(?:"[^"\\]*"(?:, )?)*\]|"[^"\\]*")', line):
            table[entry[1]] = ast.literal_eval(entry[2])
        else:
            raise PipelineError(f"ERAS.toml, line {number}: expected a table, a string or a list of strings: {line!r}")
    return tables


def load(folder: Path = FOLDER) -> Eras:
    """What ``folder`` says."""
    tables = parse((folder / "ERAS.toml").read_text(encoding="utf-8"))
    top = tables.pop("")
    eras = tuple(
        Era(name, str(t["about"]), str(t["commit"]), tuple(t["has"]), tuple(t["lacks"])) for name, t in tables.items()
    )
    return Eras(str(top["url"]), str(top["default"]), eras)
