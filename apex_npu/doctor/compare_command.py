# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu compare``: two recorded iterations; status 1 where the runs part, 2 on bad input."""

from __future__ import annotations

import argparse
import sys

from apex_npu._cli.command_line import Argument, Command
from apex_npu._cli.tables import show


def _run(options: argparse.Namespace) -> int:
    if options.rows < 1:
        return _fail(f"--rows {options.rows}: a positive number is expected")
    try:
        from apex_npu.debug.comparison.compare import compare
        from apex_npu.debug.comparison.report import HEAD, lines_after, lines_before, rows_to_show, table_of
    except ImportError as error:
        return _fail(f"{error}: torch 2.6 or newer is needed, see https://pytorch.org")
    try:
        found = compare(options.reference, options.candidate, floor=options.floor)
        if options.html:
            found.to_html(options.html)
        if options.png:
            found.plot(options.png)
    except (OSError, ValueError, ImportError) as error:
        return _fail(str(error))
    rows = rows_to_show(found, options.rows)
    print("\n".join(lines_before(found)), end="\n\n")
    styles = ["red" if row is found.first else "" for row in rows]
    show(list(table_of(rows, found.first)), HEAD, [row.cells() for row in rows], styles=styles)
    for line in lines_after(found, rows):
        print(line)
    return 1 if found.parts else 0


def _fail(reason: str) -> int:
    print(f"apex_npu compare: {reason}", file=sys.stderr)
    return 2


COMPARE = Command(
    "compare",
    "compare two files of run --record; status 1 where the runs part",
    _run,
    (
        Argument("reference", "a file of record, as of O0 on the CPU"),
        Argument("candidate", "another, as of O1 on an NPU"),
        Argument("--floor", "a file of the candidate's level on a device that is trusted", metavar="FILE"),
        Argument("--html", "write a page with all rows", metavar="FILE"),
        Argument("--png", "draw the errors of all rows", metavar="FILE"),
        Argument("--rows", "how many rows are shown", type=int, metavar="N", default=20),
    ),
    usage=("REFERENCE CANDIDATE [--floor FILE] [--html FILE] [--png FILE] [--rows N]",),
)
