# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Formatting of the diagnostics' output: counts, names, errors, lines that fit a terminal, and figures."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

import torch

_NAMED = 5
# The line width if the output does not go to a terminal.
_COLUMNS = 120


def count(number: int, noun: str) -> str:
    """Return ``number`` with ``noun``, such as ``"1 step"`` or ``"2 steps"``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str], between: str = ", ") -> str:
    """Join the first five of ``names``, and add how many more there are."""
    return between.join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def name_of(dtype: torch.dtype | None) -> str:
    """Return the name of ``dtype`` without ``torch.``; empty for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def where_of(module: str | None) -> str:
    """Return the name of a module in words."""
    return "outside of modules" if module is None else module or "the model itself"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of ``error``, or its ``repr`` if it has no message."""
    return str(error).splitlines()[0] if str(error) else repr(error)


def described(error: BaseException) -> str:
    """Return the type and the first line of ``error``."""
    return f"{type(error).__name__}: {first_line(error)}"


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Create a matplotlib figure of ``width`` by ``height`` inches; return it and its axes.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Align ``rows`` of cells in columns: the first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def fitted(text: str, indent: int = 4) -> str:
    """Wrap the lines of ``text`` at spaces to the width of the terminal, and indent continuations by ``indent``."""
    columns = max(shutil.get_terminal_size((_COLUMNS, 24)).columns, 2 * indent + 20)
    wrapper = textwrap.TextWrapper(columns, subsequent_indent=" " * indent, replace_whitespace=False)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return "\n".join(wrapper.fill(line) if len(line) > columns else line for line in text.split("\n"))
