# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The device that tests run on, what simulates it, and what it does not do.

``APEX_NPU_TEST_DEVICE`` names the device; the default is the CPU. An "npu" is simulated where there is none: by the
vendor's own torch_npu on a CANN in host memory (``tests/host_cann``) where its wheel is installed, else by a stand-in
(``tests/npu_simulator``).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

_NAME = os.environ.get("APEX_NPU_TEST_DEVICE", "cpu")


def is_installed(package: str) -> bool:
    """True where ``package`` can be imported; the folder of that name beside this file is not it."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _simulator() -> ModuleType | None:
    if any(Path("/dev").glob("davinci[0-9]*")):
        return None  # an NPU
    if is_installed("torch_npu") and is_installed("host_cann"):
        host_cann = importlib.import_module("host_cann")
        if reason := host_cann.unavailable():
            raise pytest.UsageError(reason)
        return host_cann
    if not is_installed("npu_simulator"):
        raise pytest.UsageError("there is no npu, and none is simulated: make setup-dev, or make setup-torch-npu")
    return importlib.import_module("npu_simulator")


# The package that simulates the NPU, with count(), fail_after() and live_storages(); None on hardware and elsewhere.
SIMULATOR: Any = _simulator() if _NAME.startswith("npu") else None
if SIMULATOR is not None:
    SIMULATOR.install()  # torch knows no device of that name before
# True where torch_npu is the vendor's, which is so on hardware, too.
VENDOR = _NAME.startswith("npu") and (SIMULATOR is None or SIMULATOR.__name__ == "host_cann")
if VENDOR and SIMULATOR is None:
    importlib.import_module("torch_npu")
# Arguments of the interpreter that let a script find the device.
START_SCRIPT = ["-m", SIMULATOR.__name__] if SIMULATOR is not None else []

# What the environment of a process says for a chip that saturates, where that is not a setting of the simulator.
SATURATING = {"HOST_CANN_SOC": "Ascend910ProA"} if VENDOR else {}

DEVICE = torch.device(_NAME)

# False where a rule computes with a number on the device by another kernel than with one of the host, as torch_npu:
# the last bit may differ.
SAME_KERNELS = not VENDOR

# What torch_npu and CANN do not do, by the names that `needs` takes.
_VENDOR_LACKS = {
    "channels_last": 'torch_npu takes no memory_format but "contiguous_format or preserve_format"',
    "complex_norm": "torch_npu's norm of complex numbers is complex",
    "configurable_chip": "whether a chip saturates is a property of the process: HOST_CANN_SOC=Ascend910ProA",
    "errors_at_the_call": "the host CANN finds that operands do not fit when it computes, after the call",
    "float64": "torch_npu makes float32 of what is to become float64",
    "functorch_linear": 'torch_npu\'s products raise "Cannot access storage of TensorWrapper" under torch.func.jacrev',
    "lstm_projection": "torch_npu's LSTM has no projections",
    "mixed_operands": "CANN promotes operands of two dtypes, where torch's CPU and CUDA kernels raise",
    "packed_rnn": "torch_npu pads packed sequences, and cannot unpack those of RNN and GRU",
    "stand_in_counts": "tests/vendor/test_counts.py has the counts of torch_npu's operators",
}


def _why_not(features: tuple[str, ...]) -> str:
    lacking = [_VENDOR_LACKS[feature] for feature in features]  # a name that is misspelt is an error everywhere
    return "; ".join(lacking) if VENDOR else ""


def needs(*features: str) -> pytest.MarkDecorator:
    """Skip a test, or a case of one, that needs what the vendor's torch_npu does not do."""
    return pytest.mark.skipif(VENDOR, reason=_why_not(features) or "the vendor's torch_npu")


def require(*features: str) -> None:
    """The same from inside of a test."""
    if reason := _why_not(features):
        pytest.skip(reason)


def needs_counts(*features: str) -> pytest.MarkDecorator:
    """Skip a test that counts launches where nothing counts them, or where ``features`` are lacking."""
    reason = _why_not(features) or ("" if SIMULATOR is not None else "launches are counted on a simulated NPU")
    return pytest.mark.skipif(bool(reason), reason=reason)
