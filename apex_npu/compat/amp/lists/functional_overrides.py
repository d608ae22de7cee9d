# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names of torch.nn.functional that are cast."""

import torch.nn.functional

from apex_npu.compat.amp.lists.names import cast_list

MODULE = torch.nn.functional
FP16_FUNCS = cast_list(MODULE, "half")
FP32_FUNCS = cast_list(MODULE, "float")
BANNED_FUNCS = (("binary_cross_entropy", "not safe in low precision; use binary_cross_entropy_with_logits"),)
