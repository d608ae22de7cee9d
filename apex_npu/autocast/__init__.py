# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Casts of models to a dtype, and of torch's functions as O1 specifies, based on ``torch.autocast``.

``casting.py`` describes them. Nothing here depends on loss scales, optimizers or sessions.
"""
