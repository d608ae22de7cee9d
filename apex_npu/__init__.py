# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision and fused optimizers for PyTorch on npu, cuda and cpu.

Importing this module alone imports neither torch nor any submodule.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from apex_npu.compat.finder import serve_aliases

if TYPE_CHECKING:
    from apex_npu import amp, optimizers
    from apex_npu.compat import fp16_utils, install_as_apex, multi_tensor_apply, normalization, parallel, uninstall_apex

__version__ = "0.1.0"
__all__ = [
    "amp",
    "fp16_utils",
    "install_as_apex",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "uninstall_apex",
]

serve_aliases()


def __getattr__(name: str) -> Any:
    if name in ("install_as_apex", "uninstall_apex"):
        return getattr(import_module("apex_npu.compat"), name)
    if name in __all__:
        return import_module(f"apex_npu.{name}" if name in ("amp", "optimizers") else f"apex_npu.compat.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
