# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu compare``: compares two recorded iterations; status 1 if the runs diverge, 2 on bad input."""

from __future__ import annotations

import argparse

from apex_npu._cli.command_line import Commands, add_command, fail


def _run(options: argparse.Namespace) -> int:
    if options.rows < 1:
        return fail(options, f"--rows {options.rows}: a positive number is expected")
    from apex_npu.debug.comparison.compare import compare

    try:
        found = compare(options.reference, options.candidate, floor=options.floor)
        if options.html:
            found.to_html(options.html)
        if options.png:
            found.plot(options.png)
    except (OSError, ValueError, ImportError) as error:
        return fail(options, str(error))
    print(found.to_text(options.rows))
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
