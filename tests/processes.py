# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Starts several Python processes that train together, and ends them whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def start(
    worker: Path, checks: tuple[str, ...], processes: int, store: Path, **environment: str
) -> list[subprocess.Popen]:
    """``worker CHECK...`` in ``processes`` processes, which meet at the file ``store``."""
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
        "STORE": str(store),
        "WORLD_SIZE": str(processes),
        **environment,
    }
    command = [sys.executable, "-W", "ignore", str(worker), *checks]
    return [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]


def finish(started: list[subprocess.Popen], timeout: float = 120) -> list[tuple[int, str]]:
    """The exit status and the output of each; none is left running."""
    try:
        return [(process.communicate(timeout=timeout)[0], process.returncode)[::-1] for process in started]
    finally:
        finish_by_force(started)


def finish_by_force(started: list[subprocess.Popen]) -> None:
    """End all that still run."""
    for process in started:
        process.kill()
        process.communicate()


def run(worker: Path, *checks: str, processes: int = 2, timeout: float = 120, **environment: str) -> list[str]:
    """Run ``worker CHECK...`` in several processes, all of which have to succeed.

    Returns:
        What each has printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = finish(start(worker, checks, processes, Path(folder) / "store", **environment), timeout)
    for rank, (status, _) in enumerate(results):
        assert status == 0, "\n".join([f"rank {rank} has failed", *(text for _, text in results)])
    return [output for _, output in results]
