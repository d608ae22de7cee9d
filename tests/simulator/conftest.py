# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The simulated device, for the tests of this folder; without it they are all skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from skipped_modules import skipped_module


def _why_not() -> str | None:
    """Why the simulator cannot be used here, or None when it can and is installed."""
    try:
        found = importlib.util.find_spec("npu_simulator.installation") is not None
    except ImportError:
        found = False
    if not found:
        return "npu_simulator is not installed: pip install --no-build-isolation ./tests/npu_simulator"
    import npu_simulator

    try:
        return None if npu_simulator.install() else "a real NPU is here, which is not the simulator's to test"
    except (ImportError, RuntimeError) as error:
        return str(error)


_REASON = _why_not()


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    if _REASON is not None and module_path.parent == Path(__file__).parent:
        return skipped_module(module_path, parent, _REASON)
    return None


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors: more threads only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Every test finds the device as it is after ``install``, and leaves it so."""
    import npu_simulator

    torch.manual_seed(0)
    yield
    npu_simulator.configure()
    npu_simulator.fail_after(None)
    torch.npu.set_device(0)
