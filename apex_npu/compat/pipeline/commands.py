# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The commands of ``scripts/*.sh``. ``python -m apex_npu`` also has ``patch``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from apex_npu._cli.command_line import Commands, add_command

from . import PipelineError
from .checkout import Checkout
from .fetching import generate
from .maintaining import check, make_patch


def _printed(work: Callable[[argparse.Namespace], str]) -> Callable[[argparse.Namespace], int]:
    """Wrap ``work`` to print its result or refusal. Its exit status is 0, 1 after a refusal, or 130 after Ctrl-C."""

    def run(options: argparse.Namespace) -> int:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            print(work(options), flush=True)
        except (PipelineError, OSError) as error:
            # File names in a tree that is not trusted may have control characters.
            said = "".join(c if c.isprintable() or c == "\n" else "?" for c in str(error))
            print(f"apex_npu: {said}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("apex_npu: interrupted; every tree is whole, patched or as it was", file=sys.stderr)
            return 130
        finally:
            signal.signal(signal.SIGTERM, before)
        return 0

    return run


def _patch(options: argparse.Namespace) -> str:
    return Checkout(options.folder).patch(reverse=options.reverse)


def _gen(options: argparse.Namespace) -> str:
    if options.reverse:
        return Checkout(options.out).patch(reverse=True)
    return generate(options.source, options.ref, options.out)


def add_parser(commands: Commands) -> None:
    """Add the command ``patch``."""
    help = "patch a checkout of NVIDIA's Apex to use apex_npu, or remove the patch"
    parser = add_command(commands, "patch", _printed(_patch), help)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a git checkout of NVIDIA's Apex")
    parser.add_argument("--reverse", action="store_true", help="remove the patch, byte for byte")


def add_other_parsers(commands: Commands) -> None:
    """Add the other commands of ``scripts``: gen, make-patch and check."""
    gen = add_command(commands, "gen", _printed(_gen), "clone Apex and patch the copy")
    gen.add_argument("--source", metavar="DIR|URL", help="a local checkout, or a URL; default: upstream's")
    ref = "a commit, tag or branch, or an era (2020, 2025, master); default: a checkout's own"
    gen.add_argument("--ref", help=ref)
    gen.add_argument("--out", type=Path, metavar="DIR", default=Path("build/apex"), help="default: %(default)s")
    gen.add_argument("--reverse", action="store_true", help="remove the patch from --out, byte for byte")
    help = "write patch/<era>/npu.patch from an edited checkout of its commit"
    make = add_command(commands, "make-patch", _printed(lambda options: make_patch(Checkout(options.folder))), help)
    make.add_argument("folder", type=Path, metavar="DIR")
    help = "check every patch whose commit is available"
    checking = add_command(commands, "check", _printed(lambda options: check(options.source)), help)
    source = "a checkout or mirror of NVIDIA's Apex"
    checking.add_argument("--source", metavar="DIR|URL", required=True, help=source)
