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
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments, as python -m")
    parser.add_argument("script", nargs="?", help="the script, a .py file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="what the script gets in sys.argv")
    options = parser.parse_args(arguments)
    if not options.module and (options.script is None or not Path(options.script).is_file()):
        parser.error(f"no script at {options.script!r}" if options.script else "name a script, or -m and a module")

    import npu_simulator

    npu_simulator.install(options.devices)
    if options.transfer:
        import torch_npu.contrib.transfer_to_npu  # type: ignore[import-not-found]  # noqa: F401

    if options.module:
        sys.argv = options.module
        runpy.run_module(options.module[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [options.script, *options.args]
        # As `python script.py` would have it: the script's folder, where this module's caller's was.
        sys.path[0] = str(Path(options.script).resolve().parent)
        runpy.run_path(options.script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
