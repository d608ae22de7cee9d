# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Why a step was skipped: ``find_overflow``, ``explain_overflows``, and a skipped step that is run again."""
