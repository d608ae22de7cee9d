# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Causes of skipped steps: ``find_overflow``, ``explain_overflows``, and the replay of a skipped step."""
