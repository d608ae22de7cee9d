# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ops in Triton, for cuda: the kernels, and in ``plans.py`` the launches of each op.

Triton is imported only when parameters on a GPU are fused or stepped; see ``apex_npu.ops.cuda``.
"""
