# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision and fused optimizers for PyTorch on npu, cuda and cpu."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from apex_npu import amp, optimizers

if TYPE_CHECKING:
    from apex_npu import fp16_utils, multi_tensor_apply, normalization, parallel
    from apex_npu.compat import install_as_apex, uninstall_apex

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


def __getattr__(name: str) -> Any:
    # Imported when they are asked for: most programs need none of them.
    if name in ("install_as_apex", "uninstall_apex"):
        return getattr(importlib.import_module("apex_npu.compat"), name)
    if name in __all__:
        return importlib.import_module(f"apex_npu.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
