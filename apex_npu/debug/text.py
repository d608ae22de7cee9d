# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How what diagnostics print is set: counts, lists of names, dtypes, and lines that fit a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

import torch

_NAMED = 5
# Of what is printed to no terminal, as to a file.
_COLUMNS = 120


def count(number: int, noun: str) -> str:
    """``"1 step"``, ``"2 steps"``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more there are."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def name_of(dtype: torch.dtype | None) -> str:
    """Without ``torch.``; empty for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def fitted(text: str, indent: int = 4) -> str:
    """``text`` with lines that are longer than the terminal is wide broken at spaces, and continued ``indent`` on."""
    columns = max(shutil.get_terminal_size((_COLUMNS, 24)).columns, 2 * indent + 20)
    options = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    lines: list[str] = []
    for line in text.split("\n"):
        whole = len(line) <= columns
        lines += [line] if whole else textwrap.wrap(line, columns, subsequent_indent=" " * indent, **options)
    return "\n".join(lines)
