# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What rules work with: texts and their places, names and what they mean, a program and what is said of it."""
