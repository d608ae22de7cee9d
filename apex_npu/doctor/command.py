# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu doctor``: the report, as text or JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from apex_npu._cli.command_line import Commands, add_command
from apex_npu._cli.tables import show

if TYPE_CHECKING:
    from apex_npu.doctor.checks import Finding

_WIDTH = 110
_MARKS = {"ok": " ", "note": "·", "broken": "✗"}
_STYLES = {"ok": "", "note": "yellow", "broken": "red"}


def _run(options: argparse.Namespace) -> int:
    # Otherwise importing torch would fail if torch_npu is broken; the examination imports torch_npu afterwards.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        from apex_npu.doctor.checks import State, examine
    except ImportError as error:
        print(f"apex_npu: {error}: torch 2.6 or newer is needed, see https://pytorch.org", file=sys.stderr)
        return 1
    sections = examine()
    broken = sum(finding.state is State.BROKEN for findings in sections.values() for finding in findings)
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
            mark = _MARKS[finding.state.value]
            first = f"{mark} {finding.name:{width}}  "
            text = finding.value + (f" → {finding.remedy}" if finding.remedy else "")
            lines += textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [first]
            rows.append((mark, finding.name, finding.value, finding.remedy))
            styles.append(_STYLES[finding.state.value])
        show(lines, ("", "", "", ""), rows, title=title, styles=styles)


def add_parser(commands: Commands) -> None:
    """Add the command ``doctor``."""
    help = "examine this machine: versions, devices, kernels and problems (exit status 1: something is broken)"
    parser = add_command(commands, "doctor", _run, help)
    parser.add_argument("--json", action="store_true", help="print the same as JSON, for programs")
