# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu run script.py``: run a script that imports ``apex``, unchanged; ``patch DIR``: patch an Apex."""

from __future__ import annotations

import os
import runpy
import sys

from apex_npu.compat import install_as_apex

USAGE = """\
usage: python -m apex_npu run [--force] script.py [arguments of the script]
       python -m apex_npu run [--force] -m module [arguments of the module]
       python -m apex_npu patch [--reverse] DIR

Runs a script in which the name apex, with apex.amp and apex.optimizers, is apex_npu.
  --force   even where another package called apex is installed
Or patches a checkout of NVIDIA's Apex, so that it answers with apex_npu; --reverse takes the patch out.
With several processes: torchrun --nproc-per-node 8 -m apex_npu run script.py"""


def main(arguments: list[str]) -> int:
    """Run what ``arguments``, those of the command line, say.

    Returns:
        The exit status, where the script did not end with one itself: 0, or 2 if there is nothing to run.
    """
    if arguments[:1] in (["-h"], ["--help"]) or arguments == ["run", "--help"] or arguments == ["run", "-h"]:
        print(USAGE)
        return 0
    if arguments[:1] == ["patch"]:
        from apex_npu.pipeline import __main__ as pipeline

        return pipeline.main(arguments, program="python -m apex_npu")
    if arguments[:1] != ["run"]:
        return _fail(f"unknown command {arguments[0]!r}" if arguments else "a command is missing")
    rest = arguments[1:]
    force = rest[:1] == ["--force"]
    rest = rest[force:]
    as_module = rest[:1] == ["-m"]
    rest = rest[as_module:]
    if not rest or rest[0].startswith("-"):
        return _fail(f"unknown option {rest[0]!r}" if rest else "a script is missing")
    if not as_module and not os.path.exists(rest[0]):
        return _fail(f"can't open file {rest[0]!r}: no such file")
    sys.argv = rest
    # As Python does for a script, and before the search for another apex; run_path does it for folders and archives.
    if not as_module and os.path.isfile(rest[0]) and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(rest[0]))
    try:
        install_as_apex(force=force)
    except RuntimeError as error:
        print(f"apex_npu: {error}", file=sys.stderr)
        return 2
    if as_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(rest[0], run_name="__main__")
    return 0


def _fail(reason: str) -> int:
    print(f"apex_npu: {reason}\n{USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
