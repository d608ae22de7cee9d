# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tensors that become views of one, the plain way."""

import torch


def combine_npu(tensors):
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data = part.view_as(tensor)
    return flat
