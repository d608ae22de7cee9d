# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names of torch.Tensor that are cast."""

import torch

from apex_npu.compat.amp.lists.names import cast_list

MODULE = torch.Tensor
FP16_FUNCS = cast_list(MODULE, "half")
FP32_FUNCS = cast_list(MODULE, "float")
CASTS = cast_list(MODULE, "promote")
SEQUENCE_CASTS = cast_list(MODULE, "sequence")  # none: cat and stack are not methods
