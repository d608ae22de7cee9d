# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules on flat buffers: one schema per op, a kernel per device, the reference where there is none."""

from apex_npu.ops.schemas import adam_, sgd_

__all__ = ["adam_", "sgd_"]
