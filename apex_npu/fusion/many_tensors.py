# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Functions that a step calls for thousands of tensors, each by one call into the C++ extension (50 ns per tensor).

``unfused.py`` documents the functions, and implements them for use without the extension.
"""

from __future__ import annotations

from apex_npu._extension import extension

if extension is None:
    from apex_npu.fusion.unfused import (
        WriteTable,
        any_grads,
        are_same,
        drop_grads,
        grads_of,
        has_values,
        hold_values,
        increment_versions,
        low_precision_of,
        set_grads,
        swap_data,
    )
else:
    from apex_npu._C import (  # type: ignore[assignment]
        WriteTable,
        any_grads,
        are_same,
        drop_grads,
        grads_of,
        has_values,
        hold_values,
        increment_versions,
        low_precision_of,
        set_grads,
        swap_data,
    )

__all__ = [
    "WriteTable",
    "any_grads",
    "are_same",
    "drop_grads",
    "grads_of",
    "has_values",
    "hold_values",
    "increment_versions",
    "low_precision_of",
    "set_grads",
    "swap_data",
]
