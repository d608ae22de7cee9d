# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ops that look at one parameter, or one row of it, at a time, in plain torch; see reference.py.

Whatever the number of segments, the number of torch calls is the same, and nothing waits for the device: sums are
scattered by a map from elements to segments, in which padding is a segment of its own, the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.ops.reference import add_, bias_correction_of, chunk_numel, chunks, in_dtype, skippable, write_back

# Partial sums of one segment: in a single float32 one, the millionth element would hardly count.
_MAX_LANES = 1 << 14


def segment_ids(starts: Tensor, lengths: Tensor, numel: int, device: torch.device) -> Tensor:
    """For each of ``numel`` elements the index of its segment, or ``len(starts)`` outside all of them (int64).

    There are some more, up to a multiple of what ``_lanes`` says: ``len(starts) + 1``, for elements that are not there.
    """
    count = starts.numel()
    lanes = _lanes(numel, count, device)
    ids = torch.full((-(-numel // lanes) * lanes,), count, dtype=torch.int64)
    ids[numel:] = count + 1
    # Every covered element in order of segments: its position, and whose it is.
    owner = torch.repeat_interleave(torch.arange(count), lengths)
    before = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = torch.arange(owner.numel()) - before + torch.repeat_interleave(starts, lengths)
    ids[positions] = owner
    return ids.to(device)


def _lanes(numel: int, count: int, device: torch.device) -> int:
    """How many partial sums a segment has: a power of two, and so few that all of them are less than the buffer.

    Where they are of float64 (see ``_sums``) they may be so few that all of them are less than a chunk.
    """
    together = numel // 4 if device.type == "npu" else min(numel // 4, _MAX_LANES)
    lanes = max(1, min(_MAX_LANES, together // (count + 2)))
    return 1 << (lanes.bit_length() - 1)


def _sums(
    pairs: Sequence[tuple[Tensor, Tensor]], ids: Tensor, count: int, dtype: torch.dtype, zeros: int = 0
) -> Tensor:
    """For each of ``pairs`` a row of ``dtype``: the sum of a · b over each of ``count`` segments, and over the padding.

    Then comes one arbitrary number, and as many zeros as asked for.
    """
    first = pairs[0][0]
    numel, lanes = first.numel(), _lanes(first.numel(), count, first.device)
    # An NPU has no float64 to speak of; elsewhere it costs little, and long sums need it.
    wide = dtype if first.device.type == "npu" else torch.float64
    partial = first.new_zeros(len(pairs), count + 2 + zeros, lanes, dtype=wide)
    step = max(lanes, chunk_numel(first.device) // len(pairs) // lanes * lanes)
    for begin in range(0, numel, step):
        end = min(begin + step, numel)
        owner = ids[begin : begin + step]
        products = first.new_empty(len(pairs), owner.numel(), dtype=wide)
        for product, (a, b) in zip(products, pairs, strict=True):
            torch.mul(a[begin:end].to(wide), b[begin:end].to(wide), out=product[: end - begin])
        owner = owner.view(1, -1, lanes).expand(len(pairs), -1, -1)
        partial.scatter_add_(1, owner, products.view(len(pairs), -1, lanes))
    return partial.sum(2).to(dtype)


def _update_moments_(
    direction: Tensor,
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    beta1: float,
    beta2: float,
    beta3: float,
    eps: float,
    step: int | Tensor,
    correct_first: bool,
    correct_second: bool,
    l2: float = 0.0,
    decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool,
    grad_scale: Tensor | None,
) -> None:
    """Adam's moments, and in ``direction`` the first over the root of the second, plus ``decay`` · param."""
    dtype = exp_avg.dtype
    correction1 = bias_correction_of(beta1, step) if correct_first else None
    root_correction2 = bias_correction_of(beta2, step) ** 0.5 if correct_second else None
    for u, p, g_chunk, m, v in chunks((direction, param, grad, exp_avg, exp_avg_sq)):
        g = in_dtype(g_chunk, dtype, maximize, grad_scale)
        if l2:
            g = g.add(p.to(dtype), alpha=l2)
        if beta3 == 1 - beta1:
            m.lerp_(g, beta3)
        else:
            m.mul_(beta1).add_(g, alpha=beta3)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denom = v.sqrt()
        if root_correction2 is not None:
            denom.div_(root_correction2)
        numerator = m.mul(beta1).add_(g, alpha=beta3) if nesterov else m
        torch.div(numerator, denom.add_(eps), out=u)
        if correction1 is not None:
            u.div_(correction1)
        if decay:
            u.add_(p.to(dtype), alpha=decay)


def _add_product_(to: Tensor, a: Tensor, b: Tensor, factor: float | Tensor) -> None:
    if isinstance(factor, Tensor):
        to.add_(a.mul(b).mul_(factor))
    else:
        to.addcmul_(a, b, value=factor)


def segment_dot(a: Tensor, b: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None) -> Tensor:
    """See ``apex_npu.ops.segmented.segment_dot``."""
    ids = segment_ids(starts, lengths, a.numel(), a.device) if ids is None else ids
    return _sums([(a, b)], ids, starts.numel(), a.dtype)[0, : starts.numel()]


def segment_add_(x: Tensor, y: Tensor, factors: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None) -> None:
    """See ``apex_npu.ops.segmented.segment_add_``."""
    ids = segment_ids(starts, lengths, x.numel(), x.device) if ids is None else ids
    factors = torch.cat([factors, factors.new_zeros(1)])
    for to, addend, owner in chunks((x, y, ids[: x.numel()])):
        to.addcmul_(addend, factors[owner])


@skippable(4, chunked=False)
def lamb_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    model_param: Tensor | None,
    direction: Tensor,
    starts: Tensor,
    lengths: Tensor,
    ids: Tensor | None,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    beta3: float,
    eps: float,
    step: int | Tensor,
    bias_correction: bool,
    l2: float,
    decay: float,
    adapt: bool,
    max_weight_norm: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
) -> None:
    """See ``apex_npu.ops.segmented.lamb_``."""
    _update_moments_(
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
        norms = _sums([(param, param), (direction, direction)], ids, starts.numel(), dtype)[:, :-1].sqrt_()
        unusable = (norms == 0).any(0)  # NaN is not: what has overflowed must show
        ratio = norms[0].clamp_max_(max_weight_norm).div_(norms[1]).masked_fill_(unusable, 1.0)
        ids = ids[: param.numel()]
    for p_chunk, u, owner, model_chunk in chunks((param, direction, ids if adapt else None, model_param)):
        p = p_chunk.to(dtype)
        if adapt:
            _add_product_(p, u, ratio[owner], -lr)
        else:
            add_(p, u, -lr)
        write_back(p_chunk, p, model_chunk)


@skippable(4, chunked=False)
def adamp_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    model_param: Tensor | None,
    direction: Tensor,
    starts: Tensor,
    lengths: Tensor,
    ids: Tensor | None,
    owner: Tensor,
    row_limit: Tensor,
    whole_limit: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    wd_ratio: float,
    nesterov: bool,
    maximize: bool,
    step: int | Tensor,
    grad_scale: Tensor | None = None,
) -> None:
    """See ``apex_npu.ops.segmented.adamp_``."""
    ids = segment_ids(starts, lengths, param.numel(), param.device) if ids is None else ids
    _update_moments_(
        direction,
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        beta1=beta1,
        beta2=beta2,
        beta3=1 - beta1,
        eps=eps,
        step=step,
        correct_first=False,
        correct_second=True,
        nesterov=nesterov,
        maximize=maximize,
        grad_scale=grad_scale,
    )

    # Columns: every row, the padding, and behind an arbitrary one what `owner` counts: no parameter, each parameter.
    rows, whole = starts.numel() + 1, starts.numel() + 2
    pairs = [(param, grad), (grad, grad), (param, param), (param, direction)]
    sums = _sums(pairs, ids, rows - 1, exp_avg.dtype, zeros=whole_limit.numel())
    sums[:, whole:].index_add_(1, owner, sums[:, :rows])
    if grad_scale is not None:
        sums[:2].div_(torch.cat([grad_scale, grad_scale.square()]).unsqueeze(1))
    norms = sums[1:3].sqrt().add_(eps)
    cosine = sums[0].abs().div_(norms[0] * norms[1])
    # Rows that are not below are counted: torch_npu finds the largest value by index on the CPU alone.
    above = (cosine[:rows] < row_limit[owner]).logical_not_().to(row_limit.dtype)
    by_row = torch.zeros_like(row_limit).index_add_(0, owner, above) == 0
    by_whole = cosine[whole:] < whole_limit
    multiple = sums[3].div_(norms[1].square())  # of p, in u
    of_whole = torch.where(by_whole, multiple[whole:], 0.0)
    multiple = torch.where(by_row[owner], multiple[:rows], of_whole[owner])
    if weight_decay:
        ratio = torch.ones_like(row_limit).masked_fill_(by_row | by_whole, wd_ratio)[owner]
    step_size = lr / bias_correction_of(beta1, step)
    for p_chunk, u, owned, model_chunk in chunks((param, direction, ids[: param.numel()], model_param)):
        p = p_chunk.to(exp_avg.dtype)
        u.addcmul_(p, multiple[owned], value=-1)
        if weight_decay:
            _add_product_(p, p, ratio[owned], -lr * weight_decay)
        add_(p, u, -step_size)
        write_back(p_chunk, p, model_chunk)
