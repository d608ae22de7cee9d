# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Finds tensors that share elements in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from apex_npu.fusion import extent_numel, overlapping, wraps_tensors


def sharing_memory(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the indices of pairs of ``tensors`` that share elements in memory."""
    places = [i for i, t in enumerate(tensors) if t.layout == torch.strided and not wraps_tensors(t)]
    spans = [_span(tensors[i]) for i in places]
    for k in overlapping(spans):
        for other, (begin, end) in enumerate(spans):
            if other != k and begin < spans[k][1] and spans[k][0] < end:
                i, j = places[other], places[k]
                if _share_elements(tensors[i], tensors[j]):
                    yield i, j


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + extent_numel(tensor.size(), tensor.stride()) * tensor.element_size()


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """Return whether ``a`` and ``b``, whose spans overlap, share elements; columns of one matrix do not."""
    size = a.element_size()
    if size != b.element_size():
        return True
    spans = _span(a), _span(b)
    begin = min(spans)[0]
    mask = torch.zeros((max(end for _, end in spans) - begin) // size, dtype=torch.bool, device="cpu")
    shape = [1 if stride == 0 else n for n, stride in zip(a.size(), a.stride(), strict=True)]
    mask.as_strided(shape, a.stride(), (a.data_ptr() - begin) // size).fill_(True)
    return bool(mask.as_strided(b.size(), b.stride(), (b.data_ptr() - begin) // size).any())
