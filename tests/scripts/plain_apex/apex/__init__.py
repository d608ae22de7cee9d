# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the scripts import as apex when they are the reference: float32, torch.optim, no scaling."""

from . import amp, contrib, optimizers

__all__ = ["amp", "contrib", "optimizers"]
