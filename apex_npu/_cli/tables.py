# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What commands print as a table: by rich on a terminal, where it is installed, and as plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO


def show(
    lines: Sequence[str],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    styles: Sequence[str] = (),
    file: TextIO | None = None,
) -> None:
    """Print ``rows``, which ``lines`` have as plain text.

    Args:
        lines: What is printed to a file, to a pipe, and without rich.
        head: The names of the columns; empty strings for a table without a head.
        rows: The cells. Text is printed as it is: brackets are no markup.
        title: Above the table.
        styles: rich's style of each row ("red"), "" for none.
        file: Instead of stdout.

    Example::

        >>> from apex_npu._cli.tables import show
        >>> show(["torch  2.13"], ("package", "version"), [("torch", "2.13")])
        torch  2.13
    """
    file = file or sys.stdout
    if not rows or not file.isatty() or not _print_rich(head, rows, title, styles, file):
        print("\n".join([*lines, ""]), end="", file=file)


def _print_rich(
    head: Sequence[str], rows: Sequence[Sequence[str]], title: str, styles: Sequence[str], file: TextIO
) -> bool:
    """False, and nothing printed, where rich is missing."""
    try:
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=SIMPLE, title=title or None, title_justify="left", show_header=any(head))
    for name in head:
        table.add_column(Text(name), overflow="fold")
    for number, row in enumerate(rows):
        style = styles[number] if styles else ""
        table.add_row(*map(Text, row), style=style or None)
    Console(file=file).print(table)
    return True
