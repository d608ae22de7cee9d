# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loads the C++ extension, or warns once why it cannot be used.

``extension`` is the module ``apex_npu._C``, or None if it was not built, or was built for another torch. An extension
for another torch could crash when it is loaded, so the version is read from a text file that the build writes. Without
the extension no tensor moves, and optimizers step each parameter in place by torch's operators.
"""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_BUILT_FOR = Path(__file__).with_name("_C.torch_version")
# The version of the functions in csrc/bindings.cpp.
_API = 38
# To be run in a checkout, or with the sdist's name in place of the dot. Without --force-reinstall pip keeps the build
# that is installed.
REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."
_WAY_OUT = f"using torch's operators, without fusing (slower); to rebuild it, in a checkout: {REBUILD}"


def is_switched_off() -> bool:
    """Return True if ``APEX_NPU_NO_EXT`` has a value that setup.py also treats as true."""
    return os.environ.get("APEX_NPU_NO_EXT", "").strip().lower() not in {"", "0", "false", "no", "off"}


def load(built_for: Path = _BUILT_FOR) -> ModuleType | None:
    """Return the extension, or None with a warning that says why it cannot be used.

    There is no warning if the extension is switched off or was not built.
    """
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


# The extension's module, or None.
extension: Any = load()


def require_extension(what: str) -> Any:
    """Return the extension, for ``what``, which needs it.

    Raises:
        RuntimeError: The extension is not in use.
    """
    if extension is None:
        raise RuntimeError(
            f"{what} needs apex_npu's C++ extension, which is not in use here; to build it, in a checkout and with a "
            f"C++ compiler: {REBUILD} (python -m apex_npu doctor says why it is not in use)"
        )
    return extension
