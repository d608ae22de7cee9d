# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``gradient_range``: compares gradients with the range of float16."""
