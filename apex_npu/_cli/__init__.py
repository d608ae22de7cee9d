# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Command lines as tables of data, and tables as text: what all commands of ``python -m apex_npu`` share."""
