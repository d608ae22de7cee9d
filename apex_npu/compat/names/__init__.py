# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A folder for ``sys.path``: what is in it is imported without this package's name. See ``apex_name.py``."""
