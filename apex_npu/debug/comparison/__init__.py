# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What an iteration computes beside another one, ``record`` and ``compare``, or float64, ``check_operators``."""
