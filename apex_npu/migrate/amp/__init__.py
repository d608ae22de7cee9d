# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rules that put amp into a program, or in the place of torch.amp."""
