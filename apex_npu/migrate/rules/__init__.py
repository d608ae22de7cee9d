# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rules for devices, apex and optimizers, the user's own rules, and the data of all rules."""
