# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the vendor's torch_npu on the host CANN: skipped where the wheel, or what builds its libraries, is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import host_cann
import pytest
import torch

HOST_CANN = Path(host_cann.__file__).parents[1]


NEEDS_NOTHING = {"test_host_cann_build.py"}  # neither the wheel nor a compiler


class _Skipped(pytest.Module):
    """A file of tests that are skipped together, so that the reason is printed once."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(str(host_cann.unavailable()))


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.name in NEEDS_NOTHING or host_cann.unavailable() is None:
        return None
    return _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def npu() -> torch.device:
    """The first device, installed by the first test that wants it."""
    # An operator that fails then raises where it is called. With the task queue all later tests would compute nothing.
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
    host_cann.install()
    return torch.device("npu:0")


Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_script(npu: torch.device, tmp_path: Path) -> Script:
    """Runs Python code in a process of its own, by ``python -m host_cann`` or what is given, with an environment."""

    def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(code)
        paths = os.pathsep.join([str(HOST_CANN), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, *(arguments or ("-m", "host_cann")), str(script)],
            env={**os.environ, "PYTHONPATH": paths, "HOST_CANN_QUIET": "1", **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
