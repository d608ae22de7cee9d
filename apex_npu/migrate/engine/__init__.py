# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The basis of the rules: source text and edits, scopes and names, a program and the findings on it."""
