# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The device that tests run on, its simulator, and its unsupported features.

``APEX_NPU_TEST_DEVICE`` names the device; the default is the CPU. An "npu" is simulated where there is none: by the
vendor's own torch_npu on a CANN in host memory (``tests/host_cann``) where its wheel is installed, else by a stand-in
(``tests/npu_simulator``).
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

_NAME = os.environ.get("APEX_NPU_TEST_DEVICE", "cpu")


def is_installed(package: str) -> bool:
    """True where ``package`` can be imported; the folder of that name beside this file is not it.

    Nor is what the stand-in serves as torch_npu to the processes that it spawns.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None and Path(spec.origin).parents[1].name != "spawned"


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
    SIMULATOR.install()  # the name of the device is not registered before
# True where torch_npu is the vendor's, which is so on hardware, too.
VENDOR = _NAME.startswith("npu") and (SIMULATOR is None or SIMULATOR.__name__ == "host_cann")
if VENDOR and SIMULATOR is None:
    importlib.import_module("torch_npu")
# Arguments of the interpreter that let a script find the device.
START_SCRIPT = ["-m", SIMULATOR.__name__] if SIMULATOR is not None else []

# Environment variables for a chip that saturates, where that is not a setting of the simulator.
SATURATING = {"HOST_CANN_SOC": "Ascend910ProA"} if VENDOR else {}

DEVICE = torch.device(_NAME)

# True where the chip has neither inf nor NaN, and a flag of overflows instead: that of a whole run of the tests.
SATURATES = VENDOR and SIMULATOR is not None and SIMULATOR.saturates()

# False where a rule computes with a number on the device by another kernel than with one of the host, as torch_npu:
# the last bit may differ, and what is not finite be inf or NaN.
SAME_KERNELS = not VENDOR


def synchronize() -> None:
    """Wait for the device: what has been copied to the host without a wait has come then."""
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()


def communication_backend(rank: int = 0, processes: int = 1) -> str:
    """What ``processes`` communicate with on the CPU and the device, one of which becomes that of process ``rank``."""
    if DEVICE.type == "npu":
        torch.npu.set_device(0)
        return "cpu:gloo,npu:hccl"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if processes <= torch.cuda.device_count():
            return "cpu:gloo,cuda:nccl"
    return "gloo"  # also on a GPU that processes share, which NCCL refuses


# What torch_npu and CANN do not do, by the names that `needs` takes.
_VENDOR_LACKS = {
    "affine_grid": "the host CANN has no affine_grid",
    "channels_last": 'torch_npu takes no memory_format but "contiguous_format or preserve_format"',
    "coalesced_sparse": "the host CANN does not coalesce sparse tensors",
    "complex_norm": "torch_npu's norm of complex numbers is complex",
    "configurable_chip": "whether a chip saturates is a property of the process: HOST_CANN_SOC=Ascend910ProA",
    "counted_lists": "torch_npu's operators on lists count no writes",
    "errors_at_the_call": "the host CANN finds that operands do not fit when it computes, after the call",
    "float64": "torch_npu makes float32 of what is to become float64",
    "functorch_linear": 'torch_npu\'s products raise "Cannot access storage of TensorWrapper" under torch.func.jacrev',
    "lists_of_devices": "torch_npu's operators on lists refuse tensors of several devices",
    "lstm_projection": "torch_npu's LSTM has no projections",
    "mixed_operands": "CANN promotes operands of two dtypes, where torch's CPU and CUDA kernels raise",
    "packed_rnn": "torch_npu pads packed sequences, and cannot unpack those of RNN and GRU",
    "stand_in_counts": "tests/vendor/test_counts.py has the counts of torch_npu's operators",
}
# Likewise what chips that saturate do not do.
_SATURATING_LACK = {
    "autocast_to_bfloat16": "torch_npu's autocast has no bfloat16 on a chip that saturates",
    "flag_on_the_device": "on a chip that saturates the host reads the flag of overflows, when a block ends",
    "flag_of_a_thread": "on a chip that saturates all threads share the flag of overflows",
    "inf": "a chip that saturates has the largest number in place of inf, and 0 in place of nan",
}


# Likewise what the host CANN refuses with HOST_CANN_DTYPES, which it takes elsewhere.
_DOCUMENTED_LACK = {
    "undocumented_dtypes": "CANN's documentation does not list this data type for an operator: HOST_CANN_DTYPES=1",
}
# Likewise what the versions of torch_npu before 2.10 lack.
_OLDER_LACK = {
    "fused_sgd": "this torch_npu has no kernel of torch's fused SGD, which came with 2.10",
}
# What torch lacks on a CPU.
_OLDER_TORCH_LACK = {
    "fully_shard": "fully_shard runs on a CPU since torch 2.7: its streams there have no events in 2.6",
}
# What came with a release of torch.
_NEWER_TORCH = {
    "names_of_torch_cuda": ((2, 10), "torch.cuda lacks names that migrate knows before torch 2.10"),
    "onnx_export": ((2, 13), "to_onnx needs torch 2.13"),
    "torch_muon": ((2, 9), "torch.optim has no Muon before torch 2.9"),
}
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
_LACKING = {
    **(_VENDOR_LACKS if VENDOR else {}),
    **(_SATURATING_LACK if SATURATES else {}),
    **(_OLDER_LACK if VENDOR and _TORCH < (2, 10) else {}),
    **(_OLDER_TORCH_LACK if DEVICE.type == "cpu" and _TORCH < (2, 7) else {}),
    **{feature: why for feature, (release, why) in _NEWER_TORCH.items() if release > _TORCH},
    **(_DOCUMENTED_LACK if VENDOR and os.environ.get("HOST_CANN_DTYPES") else {}),
}
_FEATURES = _VENDOR_LACKS.keys() | _SATURATING_LACK.keys() | _DOCUMENTED_LACK.keys() | _OLDER_LACK.keys()
_FEATURES |= _OLDER_TORCH_LACK.keys() | _NEWER_TORCH.keys()


def _why_not(features: tuple[str, ...]) -> str:
    if misspelt := set(features) - _FEATURES:
        raise pytest.UsageError(f"tests/devices.py has no feature {', '.join(sorted(misspelt))}")
    return "; ".join(_LACKING[feature] for feature in features if feature in _LACKING)


_extension = importlib.import_module("apex_npu._extension").extension  # after the simulator has been installed
needs_extension = pytest.mark.skipif(_extension is None, reason="needs the C++ extension")


def needs(*features: str) -> pytest.MarkDecorator:
    """Skip a test, or a case of one, that needs what the vendor's torch_npu or the chip does not do."""
    reason = _why_not(features)
    return pytest.mark.skipif(bool(reason), reason=reason)


def lacks(feature: str) -> bool:
    """True where ``needs(feature)`` would skip: for an oracle that there has to be another."""
    return bool(_why_not((feature,)))


def require(*features: str) -> None:
    """The same from inside of a test."""
    if reason := _why_not(features):
        pytest.skip(reason)


def needs_counts(*features: str) -> pytest.MarkDecorator:
    """Skip a test that counts launches where nothing counts them, or where ``features`` are lacking."""
    reason = _why_not(features) or ("" if SIMULATOR is not None else "launches are counted on a simulated NPU")
    return pytest.mark.skipif(bool(reason), reason=reason)


def are_dropped(*references: weakref.ref) -> bool:
    """Whether all objects are gone. Autograd's thread of a device drops the last graph after backward has returned."""
    for _ in range(500):
        gc.collect()
        if all(reference() is None for reference in references):
            return True
        time.sleep(0.01)
    return False


def memory_of(iteration: Callable[[], object]) -> tuple[int, int]:
    """Bytes of an NPU: the most that two iterations hold at once, when all is set up, and what is left after them."""
    for _ in range(3):
        iteration()
    gc.collect()
    torch.npu.reset_peak_memory_stats()
    for _ in range(2):
        iteration()
    gc.collect()
    return torch.npu.max_memory_allocated(), torch.npu.memory_allocated()
