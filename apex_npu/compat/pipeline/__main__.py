# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu.compat.pipeline``, which ``scripts/*.sh`` run; ``commands.py`` has the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from apex_npu._cli.command_line import Parser, run_command

from .commands import add_other_parsers, add_parser


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Run the command in ``arguments``; return 0, 1 after a refusal, or 130 after Ctrl-C. argparse exits with 2."""
    parser = Parser(prog=program, description="Patch checkouts of NVIDIA's Apex.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_parser(commands)
    add_other_parsers(commands)
    return run_command(parser, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
