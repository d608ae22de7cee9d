# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``import change_data_ptr`` in a process spawned by one that has called ``install_as_apex``."""

from apex_npu.compat.contrib.combine_tensors import change_data_ptr

__all__ = ["change_data_ptr"]
__apex_npu__ = True
