# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A plugin of pytest that records which test runs which line, and how long each test takes.

Coverage runs in every process (``COVERAGE_PROCESS_START``), in those that tests start as well: they take the name of
the test from ``PYTEST_CURRENT_TEST``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

FOLDER = Path(os.environ.get("MUTANTS_FOLDER", "build/mutants"))
# Tests on the simulated NPU are other tests than those on the CPU.
ON_NPU = " on npu"
SUFFIX = ON_NPU if os.environ.get("APEX_NPU_TEST_DEVICE") == "npu" else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    running = coverage.Coverage.current()
    if running is not None:
        if sys.gettrace() is None:  # a test before has set another trace function
            running.stop()
            running.start()
        running.switch_context(item.nodeid + SUFFIX)
    result = yield
    if running is not None:
        running.switch_context("")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Once: in the process that runs the test, and not in the one that collects the reports of all.
    if report.when == "call" and (os.environ.get("PYTEST_XDIST_WORKER") or not hasattr(report, "node")):
        with open(FOLDER / f"durations.{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps([report.nodeid + SUFFIX, report.outcome, round(report.duration, 3)]) + "\n")


def pytest_sessionfinish() -> None:
    running = coverage.Coverage.current()
    if running is not None:  # processes of pytest-xdist end without the functions of atexit
        running.stop()
        running.save()
