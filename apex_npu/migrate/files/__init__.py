# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files and notebooks: what becomes of each, reports, writing, the command."""
