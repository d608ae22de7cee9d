# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranges of a flat buffer: one for each parameter, or one for each row of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from apex_npu.ops import cpu, cuda
from apex_npu.ops.reference_segments import segment_ids, segment_sums
from apex_npu.ops.segmented import segment_dot


class Segments(NamedTuple):
    """The positions of segments in the forms that kernels read, in the order of the ops' arguments.

    Attributes:
        starts: int64 on the host: the first element of each segment.
        lengths: int64 on the host: the number of elements of each segment.
        ids: int64 on the device: the index of the segment of each element of the buffer, ``len(starts)`` for padding;
            see ``reference_segments.segment_ids``. None if the device's kernel does not need it.
    """

    starts: Tensor
    lengths: Tensor
    ids: Tensor | None

    @staticmethod
    def of(starts: Sequence[int], lengths: Sequence[int], numel: int, device: torch.device) -> Segments:
        """Return the segments of a buffer of ``numel`` elements on ``device``."""
        start, length = (torch.tensor(given, dtype=torch.int64, device="cpu") for given in (starts, lengths))
        without_ids = (device.type == "cpu" and cpu.available) or (device.type == "cuda" and cuda.takes_ranges())
        return Segments(start, length, None if without_ids else segment_ids(start, length, numel, device))

    def dots(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return for each pair (a, b) of 1-D tensors a row: the sum of a · b over each segment; see ``segment_dot``."""
        if self.ids is None:
            return torch.stack([segment_dot(a, b, *self) for a, b in pairs])
        count = self.starts.numel()
        return segment_sums(pairs, self.ids, count, pairs[0][0].dtype)[:, :count]
