# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu``, and the program ``apex-npu``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from apex_npu import __version__
from apex_npu._cli.command_line import Parser, run_command
from apex_npu.compat.pipeline import patching as patch
from apex_npu.doctor import commands as doctor
from apex_npu.export import command as convert
from apex_npu.migrate.files import command as migrate
from apex_npu.migrate.run import command as run

ABOUT = (
    "Mixed precision and fused optimizers for PyTorch on npu, cuda and cpu. COMMAND --help lists the options of a "
    "command. With several processes: torchrun --nproc-per-node 8 -m apex_npu run script.py"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of ``arguments`` (None: the process's command line). Wrong arguments exit with status 2.

    Returns:
        The exit status. A script that is run may exit with its own status.
    """
    name = os.path.basename(sys.argv[0])
    parser = Parser(prog=name if name.startswith("apex") else "python -m apex_npu", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"apex_npu {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (run, migrate, patch, convert, doctor):
        command.add_parser(commands)
    return run_command(parser, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
