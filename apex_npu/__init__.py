# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision and fused optimizers for PyTorch on npu, cuda and cpu."""

from apex_npu import amp, optimizers

__version__ = "0.1.0"
__all__ = ["amp", "optimizers"]
