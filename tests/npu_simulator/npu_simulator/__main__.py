# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m npu_simulator [--transfer] [--devices N] script.py args...``: runs a script that finds an NPU.

``-m module args...`` in place of the script runs a module, as ``python -m`` does.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m npu_simulator", description="Run a script on a simulated NPU.")
    parser.add_argument("--transfer", action="store_true", help='let "cuda" in the script mean npu')
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="how many devices there are (default 2)")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", help="the script, a .py file, or with -m a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="what the script gets in sys.argv")
    options = parser.parse_args(arguments)
    if not options.is_module and not Path(options.script).is_file():
        parser.error(f"no script at {options.script!r}")

    import npu_simulator

    npu_simulator.install(options.devices)
    if options.transfer:
        import torch_npu.contrib.transfer_to_npu  # type: ignore[import-not-found]  # noqa: F401

    sys.argv = [options.script, *options.args]
    # As `python` itself has it: the folder of a script, or the current one for a module, comes first.
    sys.path[0] = "" if options.is_module else str(Path(options.script).resolve().parent)
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(options.script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
