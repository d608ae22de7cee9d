# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu compare``: compares two recorded iterations; status 1 if the runs diverge, 2 on bad input."""

from __future__ import annotations

import argparse

from apex_npu._cli.command_line import Commands, add_command, fail
from apex_npu._cli.tables import show


def _run(options: argparse.Namespace) -> int:
    if options.rows < 1:
        return fail(options, f"--rows {options.rows}: a positive number is expected")
    from apex_npu.debug.comparison.compare import compare
    from apex_npu.debug.comparison.report import HEAD, lines_after, lines_before, rows_to_show, table_of

    try:
        found = compare(options.reference, options.candidate, floor=options.floor)
        if options.html:
            found.to_html(options.html)
        if options.png:
            found.plot(options.png)
    except (OSError, ValueError, ImportError) as error:
        return fail(options, str(error))
    rows = rows_to_show(found, options.rows)
    print("\n".join(lines_before(found)), end="\n\n")
    styles = ["red" if row is found.first else "" for row in rows]
    show(list(table_of(rows, found.first)), HEAD, [row.cells() for row in rows], styles=styles)
    for line in lines_after(found, rows):
        print(line)
    return 1 if found.parts else 0


def add_parser(commands: Commands) -> None:
    """Add the command ``compare``."""
    parser = add_command(
        commands, "compare", _run, "compare two files of run --record; exit status 1 if the runs diverge"
    )
    parser.add_argument("reference", help="a file of run --record, for instance of O0 on the CPU")
    parser.add_argument("candidate", help="another file, for instance of O1 on an NPU")
    parser.add_argument("--floor", metavar="FILE", help="a file of the candidate's level, recorded on a trusted device")
    parser.add_argument("--html", metavar="FILE", help="write a page with all rows")
    parser.add_argument("--png", metavar="FILE", help="draw the errors of all rows")
    parser.add_argument("--rows", type=int, metavar="N", default=20, help="how many rows are shown (default 20)")
