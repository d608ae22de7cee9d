# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu bench``: times of the fused optimizers and torch's on this CPU, with the published figures."""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from apex_npu._cli.command_line import Commands, add_command, fail
from apex_npu._cli.tables import show

if TYPE_CHECKING:
    from apex_npu.doctor.rounds import Spread


def _run(options: argparse.Namespace) -> int:
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


def add_parser(commands: Commands) -> None:
    """Add the command ``bench``."""
    help = "time the optimizers and torch's on this CPU, with the published figures"
    parser = add_command(commands, "bench", _run, help)
    seconds = "how long to measure, all rounds together (default 60)"
    parser.add_argument("--seconds", type=float, metavar="N", default=60.0, help=seconds)
    only = "measure only the comparisons whose names contain TEXT, for instance Adam"
    parser.add_argument("--only", metavar="TEXT", default="", help=only)
