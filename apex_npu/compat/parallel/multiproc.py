# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex.parallel.multiproc script.py ...``: run one process of the script per device.

Each process gets ``--world-size N --rank I`` as its last arguments; ``--world-size`` can be given. All but the first
write their standard output to ``GPU_I.log`` in the current folder. New scripts use torchrun.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import torch

__all__ = ["main"]

_NAME = "apex.parallel.multiproc"


def main(arguments: Sequence[str]) -> int:
    """Run the script in all processes; return 0, or the exit status of the first one that failed."""
    arguments = list(arguments)
    if "--world-size" in arguments:
        world_size = int(arguments[arguments.index("--world-size") + 1])
    else:
        world_size = torch.accelerator.device_count() or 1
        arguments += ["--world-size", str(world_size)]
    if "--rank" not in arguments:
        arguments.append("--rank")
    with ExitStack() as logs:
        processes = []
        for rank in range(world_size):
            log = logs.enter_context(open(f"GPU_{rank}.log", "w", encoding="utf-8")) if rank else None
            at = arguments.index("--rank") + 1
            arguments[at : at + 1] = [str(rank)]  # which adds the value if the option is the last word
            processes.append(subprocess.Popen([*_interpreter(), *arguments], stdout=log))
        return next(filter(None, [process.wait() for process in processes]), 0)


def _interpreter() -> list[str]:
    """Return the command that starts a script as this module was started: the same ``apex``, the same devices."""
    if _NAME in sys.orig_argv:
        return [sys.executable, *sys.orig_argv[1 : sys.orig_argv.index(_NAME) - 1]]
    return [sys.executable, "-m", "apex_npu", "run"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
