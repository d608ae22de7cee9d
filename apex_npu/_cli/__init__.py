# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The parser of commands, printed tables, options of ``run``, and calls from amp to the packages above it."""
