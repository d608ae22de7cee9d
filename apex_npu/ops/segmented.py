# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules that depend on whole parameters or their rows, and the sums that such rules need.

As in ``elementwise.py``, each function declares an op on 1-D buffers, and ``grad``, ``grad_scale``, ``lr``, ``step``,
``found_inf`` and ``encoding`` have the same meaning. ``starts``, ``lengths`` and ``ids`` are those of a ``Segments``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.ops import cuda
from apex_npu.ops.dispatch import Mutated, Op, Rule, Scratch
from apex_npu.ops.encoded_calls import RunEncoding
from apex_npu.ops.reference import (
    add_,
    add_product_,
    chunks,
    segment_ids,
    segment_sums,
    sum_of_squares,
    trust_ratio,
    update_moments_,
    wide_dtype,
    write_back,
)


@Rule
def lamb_(
    param: Mutated,
    grad: Tensor,
    exp_avg: Mutated,
    exp_avg_sq: Mutated,
    direction: Scratch,
    starts: Tensor,
    lengths: Tensor,
    ids: Tensor | None,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    beta3: float,
    eps: float,
    step: int | Tensor = 1,
    bias_correction: bool = False,
    l2: float = 0.0,
    decay: float = 0.0,
    adapt: bool = True,
    max_weight_norm: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    encoding: RunEncoding | None = None,
) -> None:
    """One step of LAMB (You et al. 2019, https://arxiv.org/abs/1904.00962).

    ::

        g ← ±g + l2 · p
        m ← beta1 · m + beta3 · g
        v ← beta2 · v + (1 − beta2) · g²
        u ← m / (1 − beta1^step) / (sqrt(v) / sqrt(1 − beta2^step) + eps) + decay · p
        p ← p − lr · r · u,   r = min(‖p‖, max_weight_norm) / ‖u‖  for each segment

    where r = 1 without ``adapt``, or if either norm is 0. Without ``bias_correction``, 1 − beta1^step and 1 −
    beta2^step are replaced by 1. Padding between segments may be written.

    Args:
        param: θ, updated in place.
        grad: g.
        exp_avg: m, updated in place.
        exp_avg_sq: v, updated in place.
        direction: Memory for u, of the states' dtype, with arbitrary values before and after the call.
        starts: The first element of each parameter; see ``Segments``.
        lengths: The number of elements of each parameter; see ``Segments``.
        ids: The index of the segment of each element, or None; see ``Segments``.
        lr: The learning rate.
        beta1: The decay of m.
        beta2: The decay of v.
        beta3: The gradient's share in m.
        eps: The number added to the denominator.
        step: The number of this update, from 1.
        bias_correction: Correct m and v for their start at 0.
        l2: The penalty added to the gradient.
        decay: The decay added to the direction.
        adapt: False keeps r at 1.
        max_weight_norm: The upper limit of ‖p‖ in r.
        maximize: Step along the gradient instead of against it.
        grad_scale: The divisor of gradients; see ``elementwise.py``.
        found_inf: The flag that prevents writing; see ``elementwise.py``.
        encoding: The encoding of the operands; see ``elementwise.py``.
    """
    update_moments_(
        direction,
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        beta1=beta1,
        beta2=beta2,
        beta3=beta3,
        eps=eps,
        step=step,
        correct_first=bias_correction,
        correct_second=bias_correction,
        l2=l2,
        decay=decay,
        maximize=maximize,
        grad_scale=grad_scale,
    )
    dtype = exp_avg.dtype
    if adapt:
        ids = segment_ids(starts, lengths, param.numel(), param.device) if ids is None else ids
        squares = segment_sums([(param, param), (direction, direction)], ids, starts.numel(), dtype)[:, :-1]
        ratio = trust_ratio(squares, max_weight_norm)
        ids = ids[: param.numel()]
    for p_chunk, u, owner in chunks((param, direction, ids if adapt else None)):
        p = p_chunk.to(dtype)
        if adapt:
            add_product_(p, u, ratio[owner], -lr)
        else:
            add_(p, u, -lr)
        write_back(p_chunk, p)


@Op
def segment_dot(a: Tensor, b: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None) -> Tensor:
    """Sum a[j] · b[j] over each segment, for squared norms and cosines of parameters or their rows.

    Args:
        a: A 1-D tensor.
        b: A 1-D tensor of a's length and dtype; may be a.
        starts: The first element of each segment; see ``Segments``.
        lengths: The number of elements of each segment; see ``Segments``.
        ids: The index of the segment of each element, or None; see ``Segments``.

    Returns:
        One sum for each segment, of a's dtype, accumulated in float64 if the device supports it.
    """
    ids = segment_ids(starts, lengths, a.numel(), a.device) if ids is None else ids
    return segment_sums([(a, b)], ids, starts.numel(), a.dtype)[0, : starts.numel()]


@Op
def segment_add_(x: Mutated, y: Tensor, factors: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None) -> None:
    """Add factors[i] · y[j] to x[j] for every element j of every segment i; other elements do not change.

    Args:
        x: A 1-D tensor, updated in place.
        y: A 1-D tensor of x's length and dtype; may be x.
        factors: One factor for each segment, of x's dtype.
        starts: The first element of each segment; see ``Segments``.
        lengths: The number of elements of each segment; see ``Segments``.
        ids: The index of the segment of each element, or None; see ``Segments``.
    """
    ids = segment_ids(starts, lengths, x.numel(), x.device) if ids is None else ids
    factors = torch.cat([factors, factors.new_zeros(1)])
    for to, addend, owner in chunks((x, y, ids[: x.numel()])):
        to.addcmul_(addend, factors[owner])


class Segments(NamedTuple):
    """The positions of segments in the forms that kernels read, in the order of the ops' arguments.

    Attributes:
        starts: int64 on the host: the first element of each segment.
        lengths: int64 on the host: the number of elements of each segment.
        ids: int64 on the device: the index of the segment of each element of the buffer, ``len(starts)`` for padding;
            see ``segment_ids``. None if the device's kernel does not need it.
    """

    starts: Tensor
    lengths: Tensor
    ids: Tensor | None

    @staticmethod
    def of(starts: Sequence[int], lengths: Sequence[int], numel: int, device: torch.device) -> Segments:
        """Return the segments of a buffer of ``numel`` elements on ``device``."""
        start, length = (torch.tensor(given, dtype=torch.int64, device="cpu") for given in (starts, lengths))
        without_ids = (device.type == "cpu" and extension is not None) or (
            device.type == "cuda" and cuda.takes_ranges()
        )
        return Segments(start, length, None if without_ids else segment_ids(start, length, numel, device))

    def dots(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return for each pair (a, b) of 1-D tensors a row: the sum of a · b over each segment; see ``segment_dot``."""
        if self.ids is None:
            return torch.stack([segment_dot(a, b, *self) for a, b in pairs])
        count = self.starts.numel()
        return segment_sums(pairs, self.ids, count, pairs[0][0].dtype)[:, :count]


@Op
def norm(x: Tensor, found_inf: Tensor | None = None) -> Tensor:
    """Return the 2-norm: 0-dim, float32 or wider, accumulated in float64 if the device supports it.

    On the CPU it is finite if all elements are, unless it is itself too large for its dtype.

    Args:
        x: A 1-D tensor.
        found_inf: float32, one element; set to 1 if an element of ``x`` is inf or nan, which does not depend on the
            norm. None if elements are not checked.
    """
    if found_inf is not None:
        look(x, found_inf)
    if x.device.type != "cpu":
        total: Tensor = torch.linalg.vector_norm(x, dtype=wide_dtype(x.dtype))
        return total
    # Squares are summed in float32 for each row and in float64 for all, unless float32 overflows or underflows.
    total = sum_of_squares(x, wide_dtype(x.dtype))
    if not 1e-30 < total < math.inf:
        total = sum_of_squares(x, torch.float64)
    return total.sqrt_().to(wide_dtype(x.dtype))


def look(x: Tensor, found_inf: Tensor) -> None:
    """Set ``found_inf`` to 1 if an element of ``x`` is inf or nan, without a wait."""
    # The largest magnitude is finite if all elements are, even if squares overflow.
    if x.numel():
        found_inf.masked_fill_(torch.linalg.vector_norm(x, math.inf).isfinite().logical_not_(), 1.0)


@Op
def norm_to_clip(x: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the ``norm`` and its ``clip_coefficient``, 0-dim. On a GPU the coefficient needs no extra launch."""
    total = norm(x)
    return total, clip_coefficient(total, max_norm)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that limits gradients of this norm to ``max_norm``, with torch's formula."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
