# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A folder for ``sys.path``: its contents are imported without this package's name. ``apex_name.py`` adds it."""
