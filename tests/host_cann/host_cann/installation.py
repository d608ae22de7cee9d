# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loads the libraries, and the vendor's torch_npu on them."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from host_cann import build

_libraries: dict[str, ctypes.CDLL] = {}


def install(folder: str | os.PathLike[str] | None = None) -> None:
    """Register the device npu, by importing the vendor's torch_npu on libraries that compute in host memory.

    The libraries are built where they are not there yet, which takes about 2 minutes and g++. Calling this a second
    time does nothing.

    Args:
        folder: where builds are kept; default: ``$HOST_CANN_BUILD``, or ``host_cann`` in the user's cache.

    Raises:
        RuntimeError: torch_npu has been imported already, on other libraries or in vain.
        BuildError: there is no compiler, no torch or no torch_npu; the message says how to get it. Or the folder for
            builds cannot be written.
        FileNotFoundError: ``HOST_CANN_DTYPES`` is neither ``1`` nor a file.
    """
    if _libraries:
        return
    if "torch_npu" in sys.modules:
        raise RuntimeError(
            "host_cann.install: torch_npu has been imported already, and looks for its libraries only then. Call "
            "install() before `import torch_npu`; where `import torch` has done it, import host_cann before torch, or "
            "set TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment"
        )
    _set_dtypes()
    folder = folder or os.environ.get("HOST_CANN_BUILD")
    if folder:
        # For processes that this one starts, too, wherever they run.
        os.environ["HOST_CANN_BUILD"] = os.path.abspath(folder)
    built = build.build()
    os.environ["ASCEND_HOME_PATH"] = str(built)
    os.environ["ASCEND_OPP_PATH"] = str(built / "opp")
    # torch_npu then logs the operators that it fails to look up; missing_operators() reads this log.
    os.environ.setdefault("ASCEND_GLOBAL_LOG_LEVEL", "2")
    _load(built)


def _set_dtypes() -> None:
    """Let ``$HOST_CANN_DTYPES`` be the full path of a file, also for processes that this one starts elsewhere."""
    chosen = os.environ.get("HOST_CANN_DTYPES")
    if not chosen:
        return
    file = Path(__file__).with_name("dtypes.txt") if chosen == "1" else Path(chosen).absolute()
    if not file.is_file():
        raise FileNotFoundError(
            f"host_cann.install: HOST_CANN_DTYPES={chosen!r}: there is no file {file}; set it to 1, or to the path of "
            "a file like dtypes.txt, or leave it unset for operators that take every dtype"
        )
    os.environ["HOST_CANN_DTYPES"] = str(file)


def _load(built: Path) -> None:
    import torch  # noqa: F401 -- libopapi.so computes with its libraries, which have to be there first

    # By their full paths, and before torch_npu loads them by name. libascendcl.so is global, since
    # torch_npu looks up some of its functions without saying in which library.
    for name in build.LIBRARIES:
        scope = ctypes.RTLD_GLOBAL if name == "libascendcl.so" else ctypes.RTLD_LOCAL
        _libraries[name] = ctypes.CDLL(str(built / name), mode=scope)
    import torch_npu  # noqa: F401


def runtime() -> ctypes.CDLL:
    """libascendcl.so, which counts, and fails on demand."""
    return _library("libascendcl.so")


def operators() -> ctypes.CDLL:
    """libopapi.so, which has the operators and the collectives."""
    return _library("libopapi.so")


def _library(name: str) -> ctypes.CDLL:
    if not _libraries:
        raise RuntimeError("host_cann: there is no device yet; call host_cann.install() first")
    return _libraries[name]
