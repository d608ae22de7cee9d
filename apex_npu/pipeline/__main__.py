# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The commands: ``scripts/*.sh`` and ``python -m apex_npu patch`` call ``main``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from .checking import check
from .checkout import Checkout
from .errors import PipelineError
from .fetching import generate
from .making import make_patch
from .patching import State, bring


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Run what ``arguments`` say.

    Returns:
        The exit status: 0, 1 after a refusal, 130 after Ctrl-C; argparse exits with 2 itself.
    """
    options = _parser(program).parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        print(options.run(options), flush=True)
    except PipelineError as error:
        print(f"apex_npu: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("apex_npu: interrupted; every tree is whole, patched or as it was", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser(program: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Patches checkouts of NVIDIA's Apex.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    patch = commands.add_parser("patch", help="patch a checkout in place, or take the patch out")
    patch.add_argument("folder", type=Path, metavar="DIR", help="a git checkout of NVIDIA's Apex")
    patch.add_argument("--reverse", action="store_true", help="take the patch out, byte for byte")
    patch.set_defaults(run=lambda o: bring(Checkout(o.folder), State.ORIGINAL if o.reverse else State.PATCHED))

    gen = commands.add_parser("gen", help="clone Apex and patch the copy")
    gen.add_argument("--source", metavar="DIR|URL", help="a local checkout, or a URL; otherwise upstream's")
    gen.add_argument("--ref", help="a commit, tag or branch, or an era of ERAS.toml; otherwise a checkout's own")
    gen.add_argument("--out", type=Path, default=Path("build/apex"), metavar="DIR", help="default: %(default)s")
    gen.add_argument("--reverse", action="store_true", help="take the patch out of --out again, byte for byte")
    gen.set_defaults(run=_gen)

    make = commands.add_parser("make-patch", help="write patch/<era>/npu.patch from an edited checkout of its commit")
    make.add_argument("folder", type=Path, metavar="DIR")
    make.set_defaults(run=lambda o: make_patch(Checkout(o.folder)))

    checks = commands.add_parser("check", help="check every patch whose commit is at hand")
    checks.add_argument("--source", required=True, metavar="DIR|URL", help="a checkout or mirror of NVIDIA's Apex")
    checks.set_defaults(run=lambda o: check(o.source))
    return parser


def _gen(options: argparse.Namespace) -> str:
    if options.reverse:
        return bring(Checkout(options.out), State.ORIGINAL)
    return generate(options.source, options.ref, options.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
