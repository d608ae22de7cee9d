# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The commands ``doctor``, ``bench`` and ``compare``. What they do is imported when they run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from apex_npu._cli.command_line import Commands, add_command, fail
from apex_npu._cli.tables import show

if TYPE_CHECKING:
    from apex_npu.doctor.checks import Finding
    from apex_npu.doctor.rounds import Spread

_WIDTH = 110
# The mark of each state, and rich's style of its row.
_MARKS = {"ok": (" ", ""), "note": ("·", "yellow"), "broken": ("✗", "red")}


def add_parser(commands: Commands) -> None:
    """Add the commands."""
    help = "examine this machine: versions, devices, kernels and problems (exit status 1: something is broken)"
    parser = add_command(commands, "doctor", _doctor, help)
    parser.add_argument("--json", action="store_true", help="print the same as JSON, for programs")
    help = "time the optimizers and torch's on this CPU, with the published figures"
    parser = add_command(commands, "bench", _bench, help)
    seconds = "how long to measure, all rounds together (default 60)"
    parser.add_argument("--seconds", type=float, metavar="N", default=60.0, help=seconds)
    only = "measure only the comparisons whose names contain TEXT, for instance Adam"
    parser.add_argument("--only", metavar="TEXT", default="", help=only)
    help = "compare two files of run --record; exit status 1 if the runs diverge"
    parser = add_command(commands, "compare", _compare, help)
    parser.add_argument("reference", help="a file of run --record, for instance of O0 on the CPU")
    parser.add_argument("candidate", help="another file, for instance of O1 on an NPU")
    parser.add_argument("--floor", metavar="FILE", help="a file of the candidate's level, recorded on a trusted device")
    parser.add_argument("--html", metavar="FILE", help="write a page with all rows")
    parser.add_argument("--png", metavar="FILE", help="draw the errors of all rows")
    parser.add_argument("--rows", type=int, metavar="N", default=20, help="how many rows are shown (default 20)")


def _doctor(options: argparse.Namespace) -> int:
    # Otherwise importing torch would fail if torch_npu is broken; the examination imports torch_npu afterwards.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        from apex_npu.doctor.checks import examine
    except ImportError as error:
        print(f"apex_npu: {error}: torch 2.6 or newer is needed, see https://pytorch.org", file=sys.stderr)
        return 1
    sections = examine()
    broken = sum(finding.state == "broken" for findings in sections.values() for finding in findings)
    if options.json:
        report = {title: [asdict(finding) for finding in findings] for title, findings in sections.items()}
        print(json.dumps({"broken": broken, "sections": report}, indent=2))
    else:
        _show(sections)
        print(f"\n{broken} broken, marked ✗" if broken else "\nNothing is broken.")
    return 1 if broken else 0


def _show(sections: Mapping[str, Sequence[Finding]]) -> None:
    width = max(len(finding.name) for findings in sections.values() for finding in findings)
    for number, (title, findings) in enumerate(sections.items()):
        lines = ["", title] if number else [title]
        rows, styles = [], []
        for finding in findings:
            mark, style = _MARKS[finding.state]
            first = f"{mark} {finding.name:{width}}  "
            text = finding.value + (f" → {finding.remedy}" if finding.remedy else "")
            lines += textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [first]
            rows.append((mark, finding.name, finding.value, finding.remedy))
            styles.append(style)
        show(lines, ("", "", "", ""), rows, title=title, styles=styles)


def _bench(options: argparse.Namespace) -> int:
    if not options.seconds > 0:
        return fail(options, f"--seconds {options.seconds:g}: a positive number is expected")
    from apex_npu._extension import extension
    from apex_npu.doctor.bench import comparisons, measure

    chosen = [comparison for comparison in comparisons() if fnmatchcase(comparison.name, f"*{options.only}*")]
    if not chosen:
        names = "\n".join(comparison.name for comparison in comparisons())
        return fail(options, f"--only {options.only}: no comparison has this in its name:\n{names}")
    print(
        f"{len(chosen)} comparisons, about {options.seconds:g} s; a ratio of 2 means half of torch's time", flush=True
    )
    rows = []
    for comparison, here in measure(chosen, options.seconds):
        rows.append((comparison.name, _spread(here), _spread(comparison.published)))
        if sys.stderr.isatty():
            print(f"\r{len(rows)} of {len(chosen)} ", end="\r", file=sys.stderr, flush=True)
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name:{width}}  {here}, published {there}" for name, here, there in rows]
    show(lines, ("torch's time over ours", "here", "published"), rows)
    print(f"Medians, and the intervals of 95 % of the rounds. Published: {chosen[0].where}.")
    if extension is None:
        print(
            "The published figures were measured with the C++ extension, which is not in use here: python -m "
            "apex_npu doctor says why."
        )
    return 0


def _spread(spread: Spread) -> str:
    return f"{spread.middle:.2f} ({spread.low:.2f} .. {spread.high:.2f})"


def _compare(options: argparse.Namespace) -> int:
    """Return 1 if the runs diverge, 2 for bad input."""
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
