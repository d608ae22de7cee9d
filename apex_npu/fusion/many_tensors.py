# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a step does for each of thousands of tensors, in one call.

``many_tensors_torch.py`` documents the functions; the extension replaces them where it is loaded.
"""

from apex_npu._extension import extension

if extension is None:
    from apex_npu.fusion.many_tensors_torch import (
        RoundedCopies,
        WriteTable,
        any_grads,
        are_same,
        drop_grads,
        grads_of,
        has_values,
        hold_grads,
        hold_values,
        increment_versions,
        lost_and_kept,
        low_precision_of,
        set_grads,
        versions_of,
        zero_grads,
    )
else:
    from apex_npu.fusion.many_tensors_cpp import (  # type: ignore[assignment]
        RoundedCopies,
        WriteTable,
        any_grads,
        are_same,
        drop_grads,
        grads_of,
        has_values,
        hold_grads,
        hold_values,
        increment_versions,
        lost_and_kept,
        low_precision_of,
        set_grads,
        versions_of,
        zero_grads,
    )

__all__ = [
    "RoundedCopies",
    "WriteTable",
    "any_grads",
    "are_same",
    "drop_grads",
    "grads_of",
    "has_values",
    "hold_grads",
    "hold_values",
    "increment_versions",
    "lost_and_kept",
    "low_precision_of",
    "set_grads",
    "versions_of",
    "zero_grads",
]
