# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names of the functions that are cast, for reading only; ``autocast/cast_lists.py`` decides which they are."""
