# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compares an iteration with another one (``record``, ``compare``), or with float64 (``check_operators``)."""
