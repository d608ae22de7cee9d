# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The checks, by section. Each asks the module that decides at run time, and reports that module's reason."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

import apex_npu
from apex_npu import _extension
from apex_npu.backends import for_device
from apex_npu.backends.requirements import installed, release
from apex_npu.compat.apex_name import names_taken
from apex_npu.doctor.precision import LAYERS, native_dtypes, speed_of_low_precision
from apex_npu.doctor.rounds import processor
from apex_npu.ops import cuda, npu
from apex_npu.optimizers import NpuFusedAdam
from apex_npu.optimizers.memory_choices import memory_choices

_OLDEST_TORCH = (2, 6)
# The newest tested release; README.md has the same.
_NEWEST_TESTED_TORCH = (2, 14)
_PACKAGES = ("numpy", "triton", "torch_npu", "timm", "transformers", "accelerate", "lightning", "deepspeed")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str  # what was examined
    value: str  # the result, in plain text
    state: Literal["ok", "note", "broken"] = "ok"  # the command ends with status 1 if something is broken
    remedy: str = ""  # the action that helps


def examine() -> dict[str, list[Finding]]:
    """Examine the extension, versions, devices and their kernels, torch.distributed and the name ``apex``.

    Also list the bytes that a parameter takes with each choice of level and format, for Adam.

    Nothing is changed. Small trial computations run on the devices, which takes a few seconds.
    """
    torch_npu = _import_torch_npu()
    return {
        "C++ extension": [_extension_state()],
        "Versions": [*_versions(), *_torch_npu(torch_npu)],
        "Devices": list(_devices()),
        "Kernels": list(_kernels()),
        "Memory of a parameter": list(_memory()),
        "Several processes": list(_collectives()),
        "The name apex": list(_apex()),
    }


# --- versions --------------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    yield Finding("apex_npu", f"{apex_npu.__version__} ({Path(apex_npu.__file__).parent})")
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", platform.platform())
    yield _torch()
    for name in _PACKAGES:
        version = installed(name)
        if version is not None:
            yield Finding(name, version)


def _torch() -> Finding:
    value, there = f"{torch.__version__} ({_built_for()})", _minor(torch.__version__)
    oldest, newest = (".".join(map(str, version)) for version in (_OLDEST_TORCH, _NEWEST_TESTED_TORCH))
    if there < _OLDEST_TORCH:
        remedy = f"torch {oldest} or newer is needed: pip install --upgrade torch"
        return Finding("torch", value, "broken", remedy)
    if there > _NEWEST_TESTED_TORCH:
        return Finding("torch", f"{value}, newer than the tested releases, torch {oldest} to {newest}", "note")
    return Finding("torch", f"{value}, within the tested releases, torch {oldest} to {newest}")


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = (*release(version), 0, 0)  # ``release`` leaves out zeros at the end
    return major, minor


def _built_for() -> str:
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    return f"for CUDA {cuda}" if cuda else f"for ROCm {hip}" if hip else "for the CPU"


def _import_torch_npu() -> ModuleType | Exception | None:
    """Return the module; None if it is not installed; or the error that its import raises.

    A separate process imports it first, because some releases abort: torch_npu 2.14 does with a torch that is built for
    CUDA, because both register the same key.
    """
    if "torch_npu" not in sys.modules:
        if importlib.util.find_spec("torch_npu") is None:
            return None
        trial = subprocess.run([sys.executable, "-c", "import torch, torch_npu"], capture_output=True, check=False)
        if trial.returncode < 0:
            what = f"a process that imports it ends with {signal.Signals(-trial.returncode).name}"
            cause = re.search(r"what\(\): +(.*)", trial.stderr.decode(errors="replace"))
            return RuntimeError(f"{what}: {cause[1]}" if cause else what)
    try:
        return importlib.import_module("torch_npu")
    except Exception as error:  # a broken installation raises anything
        return error


def _torch_npu(module: ModuleType | Exception | None) -> Iterator[Finding]:
    if isinstance(module, Exception):
        reason = f"{type(module).__name__}: {module}".splitlines()[0]
        remedy = "install CANN and source its set_env.sh; without an NPU: uninstall torch_npu"
        if torch.version.cuda:
            public = torch.__version__.partition("+")[0]
            wheel = f"pip install torch=={public} --index-url https://download.pytorch.org/whl/cpu"
            remedy = f"it needs a torch for the CPU, this one is {_built_for()}: {wheel}; then {remedy}"
        yield Finding("import torch_npu", reason, "broken", remedy)
    elif module is None:
        cards = sorted(Path("/dev").glob("davinci[0-9]*"))
        if cards:
            wanted = "{}.{}".format(*_minor(torch.__version__))
            remedy = f"the npu needs it: pip install torch_npu=={wanted}.*"
            yield Finding("torch_npu", f"not installed, though {cards[0]} is there", "broken", remedy)
    else:
        version = installed("torch_npu")  # None for a stand-in
        if version and _minor(version) != _minor(torch.__version__):
            remedy = "each torch_npu works with one torch: pip install torch=={}.{}.*".format(*_minor(version))
            yield Finding("torch_npu and torch", f"{version} and {torch.__version__}", "broken", remedy)


# --- extension -------------------------------------------------------------------------------------------------------


_WITHOUT = "nothing is fused: steps are slower, and there are no combined buffers and no combine_ddp"


def _extension_state() -> Finding:
    name = "apex_npu._C"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = _extension.load()
    if loaded is not None:
        return Finding(name, f"loaded, built for torch {torch.__version__}")
    if caught:
        reason, _, remedy = str(caught[0].message).removeprefix("apex_npu: ").partition(": using ")
        return Finding(name, reason, "broken", "using " + remedy)
    if _extension.is_switched_off():
        return Finding(name, f"switched off by APEX_NPU_NO_EXT: {_WITHOUT}", "note")
    remedy = f"with a C++ compiler, in a checkout: {_extension.REBUILD}"
    return Finding(name, f"not built: {_WITHOUT}", "note", remedy)


# --- devices ---------------------------------------------------------------------------------------------------------


def _devices() -> Iterator[Finding]:
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    yield Finding("cpu", f"{processor()}, {threads}, {torch.backends.cpu.get_cpu_capability()}")
    yield from _precision("cpu")
    if torch.version.cuda and not torch.cuda.is_available():
        remedy = "nvidia-smi shows whether the driver sees a GPU, and which CUDA it supports"
        yield Finding("cuda", "this torch is built for it, but sees no GPU", "note", remedy)
    for kind in ("cuda", "npu"):
        yield from _accelerators(kind)


def _accelerators(kind: str) -> Iterator[Finding]:
    module: Any = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return
    for index in range(module.device_count()):
        yield _guarded(f"{kind}:{index}", functools.partial(_accelerator, module, index))
    if kind == "npu":
        yield _guarded("npu, overflow", _overflow)
    yield from _precision(kind)


def _accelerator(module: Any, index: int) -> str:
    # No call may make the device current: torch_npu's backward would fail, since that device has no streams then.
    return f"{module.get_device_name(index)}, {module.get_device_properties(index).total_memory / 2**30:.1f} GiB"


def _overflow() -> str:
    saturates = for_device(torch.device("npu")).saturates()
    return "saturates: a sticky flag says so, and amp reads it" if saturates else "gives inf and NaN"


def _precision(kind: str) -> Iterator[Finding]:
    def measured(layers: str) -> str:
        speeds = speed_of_low_precision(layers, kind)
        times = ", ".join(f"{_name(dtype)} {speed:.2g} times as fast as float32" for dtype, speed in speeds.items())
        levels = {torch.float16: "O1, O2", torch.bfloat16: "O4, O5"}
        advice = "; ".join(f"{_name(dtype)}: levels {levels[dtype]}" for dtype in native_dtypes(speeds))
        advice = advice or "neither is native: mixed precision is correct here, not fast"
        return f"{times} ({advice})"

    for layers in LAYERS:
        yield _guarded(f"{kind}, {layers}", functools.partial(measured, layers))


def _guarded(name: str, ask: Callable[[], str]) -> Finding:
    """Return the result of ``ask`` as a finding; a device that fails is a finding, too."""
    try:
        return Finding(name, ask())
    except Exception as error:  # drivers raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(name, reason, "broken", "the device, or its driver, fails a trial computation")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- kernels ---------------------------------------------------------------------------------------------------------


def _kernels() -> Iterator[Finding]:
    if _extension.extension is not None:
        yield Finding("cpu", "C++ extension, all rules")
    else:
        remedy = "see the C++ extension above"
        yield Finding("cpu", "torch's fused kernels for SGD and Adam, plain torch for the others", "note", remedy)
    if torch.cuda.is_available():
        yield _cuda_kernels()
    module: Any = getattr(torch, "npu", None)
    if module is not None and module.is_available():
        device = torch.device("npu", module.current_device())
        for kernel in npu.KERNELS:
            yield _npu_kernel(kernel, device)


def _cuda_kernels() -> Finding:
    with _logged() as said:
        if cuda.takes_ranges():
            return Finding("cuda", f"Triton {installed('triton')}, all rules")
    reason = said("APEX_NPU_NO_TRITON is set")
    return Finding("cuda", f"torch's own kernels, with more launches: {reason}", "note", "pip install triton")


def _npu_kernel(kernel: str, device: torch.device) -> Finding:
    name = f"npu, {kernel}"
    with _logged() as said:
        if npu.works(kernel, device):
            return Finding(name, "used: a trial step gave the right result")
    return Finding(name, said("not available, plain torch is used (more launches)"), "note")


@contextmanager
def _logged() -> Iterator[Callable[[str], str]]:
    """Yield a function for the first message that the library has logged in the block, or a text if there is none.

    The library logs each message once in a process.
    """
    logger, listener = logging.getLogger("apex_npu"), BufferingHandler(1000)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lambda other: next((r.getMessage().removeprefix("apex_npu: ") for r in listener.buffer), other)
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagates


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory() -> Iterator[Finding]:
    for choice in memory_choices(NpuFusedAdam([torch.nn.Parameter(torch.zeros(1))])):
        parts = ", ".join(f"{name} {nbytes:.3g}" for name, nbytes in choice.parts().items() if nbytes)
        yield Finding(f"Adam, {choice.total:.3g} bytes", f"{choice.name}: {parts}")


# --- processes and names ---------------------------------------------------------------------------------------------


def _collectives() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("torch.distributed", "not in this torch", "note")
        return
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    there["hccl"] = "hccl" in dist.Backend.backend_list
    yield Finding("backends", ", ".join(name for name, is_there in there.items() if is_there) or "none")


def _apex() -> Iterator[Finding]:
    taken = names_taken()
    for name, refusal in taken.items():
        reason, _, remedy = refusal.partition(". ")
        yield Finding(name, reason, "broken", remedy)
    if not taken:
        version = installed("apex")
        served = f"the installed wheel apex {version}" if version else "python -m apex_npu run, or install_as_apex()"
        yield Finding("apex", f"free: served by {served}")
    if installed("apex") and installed("apex_npu") and not taken:
        remedy = "pip uninstall one of the two: the wheel apex has apex_npu in it"
        yield Finding("apex and apex_npu", "both are installed", "broken", remedy)
