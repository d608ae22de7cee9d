# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules that look at whole parameters, or their rows, and the sums that such rules take.

As in ``elementwise.py``: 1-D buffers, and what ``grad``, ``grad_scale``, ``model_param``, ``lr``, ``step`` and
``found_inf`` are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from apex_npu.ops.calls import call
from apex_npu.ops.segments import Segments


def lamb_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    model_param: Tensor | None,
    direction: Tensor,
    segments: Segments,
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
    max_weight_norm: float = math.inf,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of LAMB (You et al. 2019, https://arxiv.org/abs/1904.00962).

    ::

        g ← ±g + l2 · p
        m ← beta1 · m + beta3 · g
        v ← beta2 · v + (1 − beta2) · g²
        u ← m / (1 − beta1^step) / (sqrt(v) / sqrt(1 − beta2^step) + eps) + decay · p
        p ← p − lr · r · u,   r = min(‖p‖, max_weight_norm) / ‖u‖  for each segment

    with r = 1 unless ``adapt``, and where either norm is 0, and without ``bias_correction`` 1 for both of the brackets.
    Padding between segments may be written.

    Args:
        param: θ, updated in place.
        grad: g.
        exp_avg: m, updated in place.
        exp_avg_sq: v, updated in place.
        model_param: See ``elementwise.py``.
        direction: Memory for u, of the states' dtype; what it holds before and afterwards is arbitrary.
        segments: Where each parameter lies.
        lr: Learning rate.
        beta1: Decay of m.
        beta2: Decay of v.
        beta3: The gradient's share in m.
        eps: Added to the denominator.
        step: Number of this update, from 1.
        bias_correction: Correct m and v for their start.
        l2: Penalty added to the gradient.
        decay: Decay added to the direction.
        adapt: False keeps r at 1.
        max_weight_norm: ‖p‖ counts no more than this.
        maximize: Ascend instead.
        grad_scale: See ``elementwise.py``.
        found_inf: See ``elementwise.py``.
    """
    call(
        "lamb_",
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        model_param,
        direction,
        segments.starts,
        segments.lengths,
        segments.ids,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        beta3=beta3,
        eps=eps,
        step=step,
        bias_correction=bias_correction,
        l2=l2,
        decay=decay,
        adapt=adapt,
        max_weight_norm=max_weight_norm,
        maximize=maximize,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def adamp_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    model_param: Tensor | None,
    direction: Tensor,
    rows: Segments,
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
    found_inf: Tensor | None = None,
) -> None:
    """One step of AdamP (Heo et al. 2021, https://arxiv.org/abs/2006.08217).

    ::

        m ← beta1 · m + (1 − beta1) · ±g
        v ← beta2 · v + (1 − beta2) · g²
        u ← n / (sqrt(v) / sqrt(1 − beta2^step) + eps)     n = m,  or  beta1 · m + (1 − beta1) · ±g  for nesterov
        u ← u − (p · u) / (‖p‖ + eps)² · p                 for each row, or the whole parameter, or not at all
        p ← p − lr · weight_decay · p                      times wd_ratio where u was projected
        p ← p − lr / (1 − beta1^step) · u

    A parameter is projected row by row where the largest of its rows' |cos(g, p)| is below ``row_limit``; else as a
    whole where its own is below ``whole_limit``. cos(g, p) = g · p / ((‖g‖ + eps) (‖p‖ + eps)). Padding between rows
    may be written.

    Args:
        param: θ, updated in place.
        grad: g.
        exp_avg: m, updated in place.
        exp_avg_sq: v, updated in place.
        model_param: See ``elementwise.py``.
        direction: Memory for u, of the states' dtype; what it holds before and afterwards is arbitrary.
        rows: Where each row of each parameter lies.
        owner: int64, for each row the number of its parameter, counted from 1; and a 0 at the end, for padding.
        row_limit: Of the states' dtype; 0, then for each parameter δ / sqrt(length of a row), or 0: none is projected.
        whole_limit: Likewise, δ / sqrt(number of elements).
        lr: Learning rate.
        beta1: Decay of m.
        beta2: Decay of v.
        eps: Added to the denominator, and to norms.
        weight_decay: Decoupled decay.
        wd_ratio: Share of the decay that projected parameters get.
        nesterov: Look ahead.
        maximize: Ascend instead.
        step: Number of this update, from 1.
        grad_scale: See ``elementwise.py``.
        found_inf: See ``elementwise.py``.
    """
    call(
        "adamp_",
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        model_param,
        direction,
        rows.starts,
        rows.lengths,
        rows.ids,
        owner,
        row_limit,
        whole_limit,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        wd_ratio=wd_ratio,
        nesterov=nesterov,
        maximize=maximize,
        step=step,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def segment_dot(a: Tensor, b: Tensor, segments: Segments) -> Tensor:
    """Sum a[j] · b[j] over each segment: squared norms, and cosines, of parameters or their rows.

    Args:
        a: 1-D.
        b: 1-D, of a's length and dtype; may be a.
        segments: Where to sum.

    Returns:
        One sum per segment, of a's dtype, accumulated in float64 where the device has it.
    """
    sums: Tensor = torch.ops.apex_npu.segment_dot(a, b, segments.starts, segments.lengths, segments.ids)
    return sums


def segment_add_(x: Tensor, y: Tensor, factors: Tensor, segments: Segments) -> None:
    """Add factors[i] · y[j] to x[j] for every element j of every segment i; other elements stay.

    Args:
        x: 1-D, updated in place.
        y: 1-D, of x's length and dtype; may be x.
        factors: One per segment, of x's dtype.
        segments: Where to add.
    """
    torch.ops.apex_npu.segment_add_(x, y, factors, segments.starts, segments.lengths, segments.ids)


def norm(x: Tensor, found_inf: Tensor | None = None) -> Tensor:
    """The 2-norm: 0-dim, float32 or wider, accumulated in float64 where the device has it.

    On the CPU it is finite wherever all elements are, unless it is itself too large for its dtype.

    Args:
        x: 1-D.
        found_inf: float32, one element; set to 1 where an element of ``x``, rather than the norm, is inf or nan. None:
            do not look.
    """
    if found_inf is not None:
        checked: Tensor = torch.ops.apex_npu.norm.check(x, found_inf)
        return checked
    total: Tensor = torch.ops.apex_npu.norm.default(x)
    return total
