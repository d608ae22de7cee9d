# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks of several workers in one start, as a start takes longer than most of them: ``backward.accumulation``.

Run in several processes; the arguments are names of workers and of their functions.
"""

import importlib

from common import main

WORKERS = [importlib.import_module(f"{name}_worker") for name in ("training", "backward", "agreement", "failures")]

if __name__ == "__main__":
    main(
        {
            f"{worker.__name__.removesuffix('_worker')}.{name}": check
            for worker in WORKERS
            for name, check in vars(worker).items()
        }
    )
