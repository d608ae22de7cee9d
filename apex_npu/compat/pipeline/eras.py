# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Read ``patch/ERAS.toml``: the layouts that upstream has had, and the patch of each."""

from __future__ import annotations

import ast
import configparser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().with_name("patch")


@dataclass(frozen=True)
class Era:
    """A layout of upstream. A tree is of this era if it has all files of ``has`` and none of ``lacks``."""

    name: str
    about: str
    commit: str
    has: list[str]
    lacks: list[str]

    @property
    def patch_file(self) -> Path:
        """The path of the era's patch."""
        return FOLDER / self.name / "npu.patch"

    def matches(self, files: set[str]) -> bool:
        """Return whether a tree with these files is of this era."""
        return files.issuperset(self.has) and files.isdisjoint(self.lacks)


def tables() -> dict[str, dict[str, Any]]:
    """Return the tables of ERAS.toml; the lines before the first table are ``upstream``.

    The file uses the part of TOML that is also INI with literals.
    """
    parser = configparser.ConfigParser(interpolation=None)  # Python 3.10 has no tomllib
    parser.read_string("[upstream]\n" + (FOLDER / "ERAS.toml").read_text(encoding="utf-8"))
    return {name: {key: ast.literal_eval(text) for key, text in parser.items(name)} for name in parser.sections()}


def load() -> list[Era]:
    """Return the eras, in the order in which a tree is compared with them."""
    return [Era(name, **table) for name, table in tables().items() if name != "upstream"]
