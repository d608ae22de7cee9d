# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which functions are cast: for reading; ``autocast/cast_lists.py`` is where it is decided."""
