# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Public training scripts, from clones that are named in the environment: rewritten, run, and compared."""
