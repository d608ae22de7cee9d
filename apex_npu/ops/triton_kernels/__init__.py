# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ops in Triton, for cuda: kernels, and in ``plans.py`` which of them an op launches over what.

Triton is not imported before parameters on a GPU are fused or stepped: see ``apex_npu.ops.cuda``.
"""
