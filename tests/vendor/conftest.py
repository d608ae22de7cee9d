# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the vendor's torch_npu on the host CANN; elsewhere they are all skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_cann
import processes
import pytest
import torch
from devices import SIMULATOR
from skipped_modules import skipped_module

HOST_CANN = Path(host_cann.__file__).parents[1]


_REASON = "needs APEX_NPU_TEST_DEVICE=npu and the vendor's torch_npu on a host CANN: make test-torch-npu-quick"


NEEDS_NOTHING = {"test_host_cann_build.py"}  # neither the wheel nor a compiler


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    if module_path.name in NEEDS_NOTHING or module_path.parent != Path(__file__).parent:
        return None
    if SIMULATOR is not host_cann:
        return skipped_module(module_path, parent, _REASON)
    return None


@pytest.fixture(scope="session")
def npu() -> torch.device:
    """The device, without torch_npu's task queue: there an operator raises where it is called."""
    # With the queue, all later tests of the process would compute nothing. It is read at its first use.
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
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
            timeout=processes.HANG_TIMEOUT,
        )

    return run
