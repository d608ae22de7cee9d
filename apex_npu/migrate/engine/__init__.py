# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The basis of the rules: texts and places, names and their meanings, a program and the reports on it."""
