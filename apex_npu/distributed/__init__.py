# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Training with several processes: averages of gradients, checks of agreement, and sums over parts of tensors.

This package sends the flat buffers of ``fusion``; ``amp`` and ``optimizers`` use it. Start at ``grad_reducer.py``.
"""
