# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of commands: ``scripts/*.sh`` call all of them, ``python -m apex_npu`` calls ``PATCH``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from apex_npu._cli.command_line import Argument, Command

from .errors import PipelineError


def _printed(work: Callable[[argparse.Namespace], str]) -> Callable[[argparse.Namespace], int]:
    """``work``, whose result or refusal is printed; its exit status is 0, 1 after a refusal, 130 after Ctrl-C."""

    def run(options: argparse.Namespace) -> int:
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            print(work(options), flush=True)
        except PipelineError as error:
            print(f"apex_npu: {_printable(str(error))}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("apex_npu: interrupted; every tree is whole, patched or as it was", file=sys.stderr)
            return 130
        finally:
            signal.signal(signal.SIGTERM, before)
        return 0

    return run


def _printable(text: str) -> str:
    """``text`` without control characters: it may quote names of files and commits of a tree that is not trusted."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _patch(options: argparse.Namespace) -> str:
    from .checkout import Checkout
    from .patching import State, set_state

    return set_state(Checkout(options.folder), State.ORIGINAL if options.reverse else State.PATCHED)


def _gen(options: argparse.Namespace) -> str:
    from .checkout import Checkout
    from .fetching import generate
    from .patching import State, set_state

    if options.reverse:
        return set_state(Checkout(options.out), State.ORIGINAL)
    return generate(options.source, options.ref, options.out)


def _make_patch(options: argparse.Namespace) -> str:
    from .checkout import Checkout
    from .make_patch import make_patch

    return make_patch(Checkout(options.folder))


def _check(options: argparse.Namespace) -> str:
    from .checking import check

    return check(options.source)


PATCH = Command(
    "patch",
    "patch a checkout of NVIDIA's Apex, so that it answers with apex_npu, or take the patch out",
    _printed(_patch),
    (
        Argument("folder", "a git checkout of NVIDIA's Apex", type=Path, metavar="DIR"),
        Argument("--reverse", "take the patch out, byte for byte", flag=True),
    ),
    usage=("[--reverse] DIR",),
)
GEN = Command(
    "gen",
    "clone Apex and patch the copy",
    _printed(_gen),
    (
        Argument("--source", "a local checkout, or a URL; otherwise upstream's", metavar="DIR|URL"),
        Argument("--ref", "a commit, tag or branch, or an era of ERAS.toml; otherwise a checkout's own"),
        Argument("--out", "default: %(default)s", type=Path, metavar="DIR", default=Path("build/apex")),
        Argument("--reverse", "take the patch out of --out again, byte for byte", flag=True),
    ),
)
MAKE_PATCH = Command(
    "make-patch",
    "write patch/<era>/npu.patch from an edited checkout of its commit",
    _printed(_make_patch),
    (Argument("folder", type=Path, metavar="DIR"),),
)
CHECK = Command(
    "check",
    "check every patch whose commit is at hand",
    _printed(_check),
    (Argument("--source", "a checkout or mirror of NVIDIA's Apex", metavar="DIR|URL", required=True),),
)
COMMANDS = (PATCH, GEN, MAKE_PATCH, CHECK)
