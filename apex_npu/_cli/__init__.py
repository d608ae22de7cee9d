# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Command lines and options as tables of data, tables as text, and the hooks by which what is above amp starts."""
