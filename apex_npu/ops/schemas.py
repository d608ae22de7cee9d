# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every op once: its schema, its shape-only twin for tracing, which kernel runs where, and a typed Python function.

All ops work in place on 1-D buffers of one length and device. Parameters and gradients share a dtype; states have it,
too, or float32 beside float16 and bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex_npu.ops import aten_fused, reference

_library = torch.library.Library("apex_npu", "DEF")  # lives as long as the process

_library.define(
    "sgd_(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, *, float lr, float momentum, float dampening, "
    "float weight_decay, bool nesterov, bool maximize, bool first) -> ()"
)
_library.define(
    "adam_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? max_exp_avg_sq, *, "
    "float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize, int step) -> ()"
)


def _in_place_only(*args: object, **kwargs: object) -> None:
    """Shapes do not change and nothing is returned: all that tracing needs to know."""


for _name, _reference, _fused in (
    ("sgd_", reference.sgd_, aten_fused.sgd_),
    ("adam_", reference.adam_, aten_fused.adam_),
):
    _library.impl(_name, _reference, "CompositeExplicitAutograd")
    _library.impl(_name, _fused, "CPU")
    _library.impl(_name, _fused, "CUDA")
    _library.impl(_name, _in_place_only, "Meta")


def sgd_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> None:
    """One step of stochastic gradient descent, by torch.optim.SGD's rule.

    ::

        g ← ±g + weight_decay · p
        b ← g                                   if first
        b ← momentum · b + (1 − dampening) · g  else
        p ← p − lr · (g + momentum · b  if nesterov else  b)

    Args:
        param: θ, updated in place.
        grad: Not written.
        momentum_buffer: b, updated in place; None without momentum.
        lr: Learning rate.
        momentum: Of b.
        dampening: Of the gradient's share in b.
        weight_decay: L2 penalty.
        nesterov: Look ahead.
        maximize: Ascend instead.
        first: b has never been written.
    """
    torch.ops.apex_npu.sgd_(
        param,
        grad,
        momentum_buffer,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        first=first,
    )


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    step: int,
) -> None:
    """One step of Adam (Kingma & Ba 2014, https://arxiv.org/abs/1412.6980) or AdamW.

    ::

        p ← p − lr · weight_decay · p      if decoupled,   else  g ← ±g + weight_decay · p
        m ← beta1 · m + (1 − beta1) · g
        v ← beta2 · v + (1 − beta2) · g²
        p ← p − lr / (1 − beta1^step) · m / (sqrt(v̂) / sqrt(1 − beta2^step) + eps)

    with v̂ = v, or the running maximum of v where ``max_exp_avg_sq`` is given (AMSGrad, of the uncorrected v as in
    torch).

    Args:
        param: θ, updated in place.
        grad: Not written.
        exp_avg: m, updated in place.
        exp_avg_sq: v, updated in place.
        max_exp_avg_sq: Running maximum of v, updated in place; None without AMSGrad.
        lr: Learning rate.
        beta1: Decay of m.
        beta2: Decay of v.
        eps: Added to the denominator.
        weight_decay: L2 penalty, or decoupled decay (Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101).
        decoupled: Which of the two.
        maximize: Ascend instead.
        step: Number of this update, from 1.
    """
    torch.ops.apex_npu.adam_(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        step=step,
    )
