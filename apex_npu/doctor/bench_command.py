# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu bench``: each goal, met, missed or not clear on this CPU, beside the published figure."""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from apex_npu._cli.command_line import Argument, Command
from apex_npu._cli.tables import show

if TYPE_CHECKING:
    from apex_npu.doctor.rounds import Spread

_STYLES = {"met": "", "missed": "red", "not clear": "yellow"}


def _run(options: argparse.Namespace) -> int:
    if not options.seconds > 0:
        return _fail(f"--seconds {options.seconds:g}: a positive number is expected")
    try:
        from apex_npu._extension import extension
        from apex_npu.doctor.bench import goals, measure
    except ImportError as error:
        return _fail(f"{error}: torch 2.6 or newer is needed, see https://pytorch.org")
    chosen = [goal for goal in goals() if fnmatchcase(goal.name, f"*{options.only}*")]
    if not chosen:
        return _fail(f"--only {options.only}: no goal has this in its name:\n" + "\n".join(g.name for g in goals()))
    print(
        f"{len(chosen)} comparisons, about {options.seconds:g} s; a ratio of 2 means half of torch's time", flush=True
    )
    results = []
    for result in measure(chosen, options.seconds):
        results.append(result)
        if sys.stderr.isatty():
            print(f"\r{len(results)} of {len(chosen)} ", end="\r", file=sys.stderr, flush=True)
    rows = [
        (
            result.verdict,
            result.goal.name,
            f">= {result.goal.at_least:.2f}",
            _spread(result.here),
            _spread(result.goal.published),
        )
        for result in results
    ]
    width = max(len(row[1]) for row in rows)
    lines = [
        f"{verdict:9}  {name:{width}}  goal {goal:8}  {here}, published {there}"
        for verdict, name, goal, here, there in rows
    ]
    styles = [_STYLES[result.verdict] for result in results]
    show(lines, ("", "torch's time over ours", "goal", "here", "published"), rows, styles=styles)
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in _STYLES}
    print(
        f"{counts['met']} goals met, {counts['missed']} missed (the whole interval is below the goal), "
        f"{counts['not clear']} not clear (the median alone is). Published: {chosen[0].where}, one core of an AMD EPYC."
    )
    if extension is None:
        print("The C++ extension is not in use, with which figures were published: python -m apex_npu doctor says why.")
    return 1 if counts["missed"] else 0


def _spread(spread: Spread) -> str:
    return f"{spread.middle:.2f} ({spread.low:.2f} .. {spread.high:.2f})"


def _fail(reason: str) -> int:
    print(f"apex_npu bench: {reason}", file=sys.stderr)
    return 2


BENCH = Command(
    "bench",
    "time the optimizers beside torch's on this CPU, with the published figures (exit status 1: a goal is missed)",
    _run,
    (
        Argument(
            "--seconds", "how long to measure, all rounds together (default 60)", type=float, metavar="N", default=60.0
        ),
        Argument(
            "--only", "measure only the goals whose names contain TEXT, for instance Adam", metavar="TEXT", default=""
        ),
    ),
    usage=("[--seconds N] [--only TEXT]",),
)
