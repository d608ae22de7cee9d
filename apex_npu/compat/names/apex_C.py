# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``import apex_C`` in a process spawned by one that has called ``install_as_apex``."""

from apex_npu.compat.flattening import flatten, unflatten

__all__ = ["flatten", "unflatten"]
__apex_npu__ = True
