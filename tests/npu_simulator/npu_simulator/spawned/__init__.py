# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A folder for ``sys.path``, which processes that multiprocessing spawns inherit; see ``installation.py``."""
