# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tables that commands print: by rich on a terminal, if it is installed, and else as plain lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO


def show(
    lines: Sequence[str],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    styles: Sequence[str] = (),
    file: TextIO | None = None,
) -> None:
    """Print ``rows`` as a table, or ``lines``, which have the same content as plain text.

    Args:
        lines: The lines that are printed to a file or a pipe, and without rich.
        head: The names of the columns; empty strings for a table without a head.
        rows: The cells. Text is printed unchanged: brackets are not markup.
        title: The title above the table.
        styles: rich's style of each row ("red"), "" for none.
        file: The file to print to; None: stdout.

    Example::

        >>> from apex_npu._cli.tables import show
        >>> show(["torch  2.13"], ("package", "version"), [("torch", "2.13")])
        torch  2.13
    """
    file = file or sys.stdout
    if rows and file.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console(file=file).print(as_rich(head, rows, title, styles))
            return
    print("\n".join([*lines, ""]), end="", file=file)


def as_rich(
    head: Sequence[str], rows: Sequence[Sequence[str]], title: str, styles: Sequence[str] = (), numbers: bool = False
) -> Any:
    """Return a table of rich; with ``numbers``, all columns but the first are right-aligned.

    Raises:
        ImportError: rich is missing.
    """
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, title=Text(title) if title else None, title_justify="left", show_header=any(head))
    for i, name in enumerate(head):
        table.add_column(Text(name), justify="right" if numbers and i else "left", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style=styles[number] if styles and styles[number] else None)
    return table
