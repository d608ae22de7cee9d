# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rules that add amp to a program, or replace torch.amp."""
