# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``profile``: reports where the time of a step goes; and the ranges that profilers show."""
