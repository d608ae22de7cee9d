# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Puts the device into torch, and the stand-in into ``sys.modules``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType

import torch

_SPAWNED = str(Path(__file__).with_name("spawned"))
_DEVICES = "NPU_SIMULATOR_DEVICES"  # the number of devices, for processes that this one starts
_lock = threading.Lock()
_libraries: list[torch.library.Library] = []  # of operators in Python
_device_count: int | None = None  # what install() was called with, once it has been


def installed() -> bool:
    """Whether the simulated device is part of torch in this process."""
    return _device_count is not None


def install(device_count: int | None = None) -> bool:
    """Give torch the device "npu", and ``import torch_npu`` something to find, also in processes that are spawned.

    Calling it again with the same arguments does nothing. Where a real ``torch_npu`` can be imported, the device is the
    real one and the simulator stays out of the way.

    Args:
        device_count: How many devices there are: npu:0, npu:1, ... By default as many as there are already, in this
            process or in the one that has started it, or else two.

    Returns:
        True where the device is simulated, False where it is real.

    Raises:
        ImportError: The simulator was built for another torch, or not at all.
        RuntimeError: Another backend has taken torch's PrivateUse1, or another number of devices is installed already.
        ValueError: ``device_count`` is out of range.
    """
    global _device_count
    with _lock:
        if _device_count is not None:
            if device_count not in (None, _device_count):
                raise RuntimeError(
                    f"npu_simulator is installed with device_count={_device_count} already, and a process has one set "
                    f"of devices, got device_count={device_count}; install it once, or start another process"
                )
            return True
        if _real_torch_npu() is not None:
            return False
        if device_count is None:
            device_count = int(os.environ.get(_DEVICES, "2"))
        if isinstance(device_count, bool) or not isinstance(device_count, int):
            raise TypeError(f"device_count must be an int, got {device_count!r}")
        if not 1 <= device_count <= 16:
            raise ValueError(f"device_count must be in [1, 16], got {device_count}")
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone" or hasattr(torch, "npu"):
            raise RuntimeError(
                f"another backend ({taken!r}) has taken torch's PrivateUse1 in this process, and it has room for one; "
                "start a process without it to use npu_simulator"
            )
        _load_extension().register(device_count)
        _name_device()
        _device_count = device_count
        os.environ[_DEVICES] = str(device_count)
        if _SPAWNED not in sys.path:
            sys.path.insert(1, _SPAWNED)  # in front of a torch_npu that cannot be imported; the first is the script's
        return True


def _real_torch_npu() -> ModuleType | None:
    """The real package where it is installed and its drivers are, else None."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or (spec.origin or "").startswith(_SPAWNED):
        return None
    try:
        return importlib.import_module("torch_npu")
    except Exception as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch_npu"]:
            del sys.modules[name]  # half of it
        warnings.warn(f"torch_npu cannot be imported ({error}); the simulator takes its place", stacklevel=3)
        return None


def _load_extension() -> ModuleType:
    """The C++ part, refused before it is loaded where it could only crash."""
    way_out = "build it with: pip install --no-build-isolation --force-reinstall --no-deps ./tests/npu_simulator"
    note = Path(__file__).with_name("_C.torch_version")
    if not note.is_file():
        raise ImportError(f"npu_simulator has no compiled part in {note.parent}; {way_out}")
    built_for = note.read_text(encoding="utf-8").strip()
    if built_for != torch.__version__:
        raise ImportError(
            f"npu_simulator was built for torch {built_for}, and this is torch {torch.__version__}; {way_out}"
        )
    if torch.distributed.is_available():
        importlib.import_module("torch.distributed")  # its C++ base classes have to be known first
    return importlib.import_module("npu_simulator._C")


def _name_device() -> None:
    torch.utils.rename_privateuse1_backend("npu")
    from npu_simulator import npu, shutdown, stand_in, sync_batch_norm

    torch._register_device_module("npu", npu)
    sys.modules["torch.npu"] = npu
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    stand_in.install()
    _libraries.append(sync_batch_norm.register())
    shutdown.register()
    if torch.distributed.is_available():
        from npu_simulator import hccl

        hccl.register()
