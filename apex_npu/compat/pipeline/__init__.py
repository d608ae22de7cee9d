# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Turns a checkout of NVIDIA's Apex into one that answers with this package, and back. Start at ``__main__.py``.

Imports inside are relative, and none needs torch: ``scripts/*.sh`` run this folder as a package of its own, on machines
that may have git and Python alone.
"""
