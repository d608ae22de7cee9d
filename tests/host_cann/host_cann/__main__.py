# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m host_cann [--transfer] script.py args...``, or ``-m module args...``: runs a script that wants an NPU."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import host_cann


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m host_cann", description="Run a script on the vendor's torch_npu, without an NPU."
    )
    parser.add_argument(
        "--transfer", action="store_true", help='let "cuda" in the script mean npu, as transfer_to_npu does'
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", help="the script, a .py file, or with -m a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="what the script gets in sys.argv")
    options = parser.parse_args(arguments)
    if not options.is_module and not Path(options.script).is_file():
        parser.error(f"no script at {options.script!r}")
    try:
        host_cann.install()
    except host_cann.BuildError as error:
        sys.exit(str(error))
    if options.transfer:
        import torch_npu.contrib.transfer_to_npu  # noqa: F401
    try:
        _run(options.script, options.args, is_module=options.is_module)
    finally:
        _report_missing()


def _run(script: str, args: list[str], is_module: bool) -> None:
    sys.argv = [script, *args]
    # As `python` itself has it: the folder of a script, or the current one for a module, comes first.
    sys.path[0] = "" if is_module else str(Path(script).resolve().parent)
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _report_missing() -> None:
    missing = host_cann.missing_operators()
    for kind, what in (
        ("called", "operators that failed because they are not implemented"),
        ("sought", "operators that torch_npu looked for in vain, and may have replaced by older ones"),
    ):
        if missing[kind]:
            print(f"host_cann: {what}: {', '.join(missing[kind])}", file=sys.stderr)


if __name__ == "__main__":
    main()
