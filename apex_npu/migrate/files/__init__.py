# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files and notebooks: planning the changes, reports, writing, and the command."""
