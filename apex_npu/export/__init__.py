# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models and checkpoints for other programs: ONNX files, weights from files, checkpoints of apex and torch.

``to_onnx`` writes a model, ``load_weights`` reads weights into one. ``contents.parts_of`` finds the states in a
checkpoint, ``conversion.convert`` translates them, ``files`` reads and writes. Importing this module, and ``command``,
needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apex_npu.export.files import CheckpointError
    from apex_npu.export.onnx import ExportError, to_onnx
    from apex_npu.export.weights import load_weights

__all__ = ["CheckpointError", "ExportError", "load_weights", "to_onnx"]

_HOMES = {"CheckpointError": "files", "ExportError": "onnx", "load_weights": "weights", "to_onnx": "onnx"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"apex_npu.export.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
