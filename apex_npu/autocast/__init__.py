# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Casts: models to a dtype, and torch's functions as O1 specifies, on top of ``torch.autocast``. See ``casting.py``.

Nothing here depends on loss scales, optimizers or sessions.
"""
