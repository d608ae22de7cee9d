# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of examples share: an example's modules, the losses that it trains on, and runs in processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from devices import START_SCRIPT
from processes import HANG_TIMEOUT

from apex_npu import amp

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NETWORKS = Path(__file__).parent / "networks"
# Names that the folders of examples have in common.
SHARED_NAMES = ("main", "train", "data", "model", "models", "sharded")


@pytest.fixture
def example(monkeypatch) -> Iterator[Callable[[str], ModuleType]]:
    """``example("gan")`` is examples/gan/main.py, imported."""

    def forget() -> None:
        for name in SHARED_NAMES:
            sys.modules.pop(name, None)

    def load(folder: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(EXAMPLES / folder))
        for setting in ("benchmark", "deterministic"):  # as they were, after the test
            monkeypatch.setattr(torch.backends.cudnn, setting, getattr(torch.backends.cudnn, setting))
        forget()
        return importlib.import_module("main")

    yield load
    forget()


@pytest.fixture
def losses(monkeypatch) -> list[float]:
    """The losses that have been given to amp.scale_loss."""
    recorded: list[float] = []
    scale_loss = amp.scale_loss

    def record(loss, *args, **kwargs):
        recorded.append(loss.item())
        return scale_loss(loss, *args, **kwargs)

    monkeypatch.setattr(amp, "scale_loss", record)
    return recorded


@pytest.fixture
def refuses(run, losses, capsys) -> Callable[..., None]:
    """``refuses(words, *options)``: a run with ``options`` ends with ``words`` before it trains."""

    def check(words: str, *options: str, **others: Any) -> None:
        with pytest.raises(SystemExit) as refusal:
            run(*options, **others)
        assert words in f"{refusal.value}{capsys.readouterr().err}"
        assert losses == []

    return check


def start(script: str, *args: str, processes: int = 1, before: str = "") -> subprocess.CompletedProcess[str]:
    """``python EXAMPLES/script args...``, or torchrun, on the device of this run of the tests.

    ``before`` is what the interpreter executes first, instead of finding the device.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(NETWORKS)]),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("LOCAL_RANK", None)
    path = str(EXAMPLES / script)
    if processes > 1:
        by = START_SCRIPT or [str(Path(__file__).with_name("start_on_gloo.py"))]
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *by, path]
    elif before:
        run = (
            "import os, runpy; sys.argv = sys.argv[1:]; sys.path[0] = os.path.dirname(sys.argv[0]); "
            "runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        command = ["-c", f"import sys\n{before}\n{run}", path]
    else:
        command = [*START_SCRIPT, path]
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command, *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT,
        check=False,
    )


@pytest.fixture
def start_example() -> Callable[..., subprocess.CompletedProcess[str]]:
    return start


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """Examples look here for what torchrun tells them."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
