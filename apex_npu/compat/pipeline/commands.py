# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu patch``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from apex_npu._cli.command_line import Commands, add_command

from . import PipelineError
from .patching import patch


def printed(work: Callable[[argparse.Namespace], str]) -> Callable[[argparse.Namespace], int]:
    """Wrap ``work`` to print its result or refusal. Its exit status is 0, or 1 after a refusal."""

    def run(options: argparse.Namespace) -> int:
        try:
            result = work(options)
        except (PipelineError, OSError) as error:
            print(f"apex_npu: {error}", file=sys.stderr)
            return 1
        print(result)
        return 0

    return run


def add_parser(commands: Commands) -> None:
    """Add the command ``patch``."""
    help = "patch a tree of NVIDIA's Apex to use apex_npu, or remove the patch"
    parser = add_command(commands, "patch", printed(lambda o: patch(o.folder, reverse=o.reverse)), help)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkout of NVIDIA's Apex")
    parser.add_argument("--reverse", action="store_true", help="remove the patch, byte for byte")
