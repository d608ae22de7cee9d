# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What all tests share: fixed seeds, and a check that nothing of torch stays patched."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

# torch imports the vendor's torch_npu by itself, before there is anything for it to run on: devices.py does it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import pytest
import torch
from covering import mark_sweeps
from devices import DEVICE
from filelock import FileLock

from apex_npu import amp
from apex_npu._extension import extension

# Without a GPU Triton's kernels are interpreted: it reads this at its first import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The tensors here are small: a second thread only waits, and on a busy machine it waits long.
torch.set_num_threads(1)

# torch.manual_seed formats the whole stack for each kind of device that is not initialized, a millisecond each time.
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    if not _kind.is_available():
        _kind.manual_seed_all = lambda seed: None

# Functions that amp patches at O1; each test must leave them as it found them.
_PATCHABLE = (
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.function.BackwardCFunction, "apply"),
    (torch.nn.functional, "interpolate"),
    (torch.nn.functional, "binary_cross_entropy"),
    (torch.Tensor, "cpu"),
    (torch.Tensor, "__ipow__"),
    (torch.nn.Module, "zero_grad"),
)


# Marks of all tests of a folder.
_FOLDERS = {
    "amp": "device",
    "debug": "device",
    "fp16_utils": "device",
    "integrations": "framework",
    "normalization": "device",
    "scripts": "device",
    "vendor": "device",
}


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.parent.name
        if folder in _FOLDERS:
            item.add_marker(_FOLDERS[folder])
        # On an NPU those of diagnostics repeat what they show on the CPU.
        if folder == "debug" and DEVICE.type == "npu" and item.get_closest_marker("slow"):
            item.add_marker("sweep")
    mark_sweeps(items)


def pytest_collection_finish() -> None:
    """Free each collection of garbage from looking through all modules and tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Without the extension skip a test when it asks for what needs it."""
    try:
        return (yield)
    except RuntimeError as error:
        if extension is None and "needs apex_npu's C++ extension" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def _clean_slate() -> Iterator[None]:
    torch.manual_seed(0)
    # torch.testing's internal tables, once imported by some test, forbid plain scripts to set cudnn's flags.
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
    before = [getattr(owner, name) for owner, name in _PATCHABLE]
    autocast_before = torch.is_autocast_enabled(DEVICE.type)
    yield
    amp.shutdown()
    assert torch.is_autocast_enabled(DEVICE.type) == autocast_before
    for (owner, name), original in zip(_PATCHABLE, before, strict=True):
        assert getattr(owner, name) is original, f"{owner.__name__}.{name} is still patched"


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """Calls a function in the first of pytest-xdist's processes that asks; all get what it returns, by way of JSON."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def get(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"{name}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_text(json.dumps(make()), encoding="utf-8")
            return json.loads(path.read_text(encoding="utf-8"))

    return get
