# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu.compat.pipeline``: ``gen``, which ``scripts/gen.sh`` runs, and ``make-patch``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from apex_npu._cli.command_line import Parser, add_command, run_command

from .checkouts import generate, make_patch
from .patching import patch, printed


def _gen(options: argparse.Namespace) -> str:
    if options.reverse:
        return patch(options.out, reverse=True)
    return generate(options.source, options.ref, options.out)


if __name__ == "__main__":
    parser = Parser(description="Patch checkouts of NVIDIA's Apex.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    gen = add_command(commands, "gen", printed(_gen), "clone Apex and patch the copy")
    gen.add_argument("--source", metavar="DIR|URL", help="a local checkout, or a URL; default: upstream's")
    ref = "a commit, tag or branch, or an era (2020, 2025, master); default: a checkout's own"
    gen.add_argument("--ref", help=ref)
    gen.add_argument("--out", type=Path, metavar="DIR", default=Path("build/apex"), help="default: %(default)s")
    gen.add_argument("--reverse", action="store_true", help="remove the patch from --out, byte for byte")
    help = "write patch/<era>/npu.patch from an edited checkout of its commit"
    make = add_command(commands, "make-patch", printed(lambda options: make_patch(options.folder)), help)
    make.add_argument("folder", type=Path, metavar="DIR")
    sys.exit(run_command(parser, sys.argv[1:]))
