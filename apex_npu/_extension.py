# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loads the C++ extension, or warns once why the pure-PyTorch fallback is used.

``extension`` is the module ``apex_npu._C``, or None where it was not built, or was built for another torch: loading
such a one could crash, so the version is read from the text file that the build leaves beside it.
"""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType

import torch

_BUILT_FOR = Path(__file__).with_name("_C.torch_version")
# Of the functions in csrc/bindings.cpp, and of what the library registers with torch.
_API = 27
# Run in a checkout, or with the name of the sdist for the dot; without --force-reinstall pip keeps what is there.
REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."
_WAY_OUT = f"using the pure-PyTorch fallback (slower); to rebuild it, in a checkout: {REBUILD}"


def is_switched_off() -> bool:
    """True where ``APEX_NPU_NO_EXT`` is set, to the same words as for setup.py."""
    return os.environ.get("APEX_NPU_NO_EXT", "").strip().lower() not in {"", "0", "false", "no", "off"}


def load(built_for: Path = _BUILT_FOR) -> ModuleType | None:
    """The extension, or None with a warning that says why it cannot be used; without one where there is none."""
    if is_switched_off():
        return None
    if not built_for.exists():
        return None
    version = built_for.read_text(encoding="utf-8").strip()
    if version != torch.__version__:
        warnings.warn(
            f"apex_npu: the C++ extension was built for torch {version}, this is torch {torch.__version__}: {_WAY_OUT}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    try:
        module = importlib.import_module("apex_npu._C")
    except ImportError as error:
        warnings.warn(f"apex_npu: the C++ extension does not load ({error}): {_WAY_OUT}", RuntimeWarning, stacklevel=2)
        return None
    if getattr(module, "API", None) != _API:
        warnings.warn(f"apex_npu: the C++ extension is of another version: {_WAY_OUT}", RuntimeWarning, stacklevel=2)
        return None
    return module


extension: ModuleType | None = load()
