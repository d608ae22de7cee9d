# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sees every operator of forward and backward: its line, its module, the range of its results."""
