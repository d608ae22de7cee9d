# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every op once: its schema, its shape-only twin for tracing, which kernel runs where, and a typed Python function.

All ops work in place on 1-D buffers of one length and device. Parameters and gradients share a dtype; states have it,
too, or float32 beside float16 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_npu.ops import aten_fused, cpu, reference
from apex_npu.ops.segments import Segments

_library = torch.library.Library("apex_npu", "DEF")  # lives as long as the process

_SCHEMAS = (
    "sgd_(Tensor(a!) param, Tensor(b!) grad, Tensor(c!)? momentum_buffer, *, float lr, float momentum, "
    "float dampening, float weight_decay, bool nesterov, bool maximize, bool first, Tensor? grad_scale=None) -> ()",
    "adam_(Tensor(a!) param, Tensor(b!) grad, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, "
    "Tensor(e!)? max_exp_avg_sq, *, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "bool decoupled, bool maximize, int step, Tensor? grad_scale=None) -> ()",
    "adam_direction_(Tensor(a!) direction, Tensor param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, *, "
    "float beta1, float beta2, float beta3, float eps, float bias_correction1, float bias_correction2, float l2, "
    "float decay, Tensor? grad_divisor, bool nesterov, bool maximize) -> ()",
    "rmsprop_(Tensor(a!) param, Tensor grad, Tensor(b!) square_avg, Tensor(c!)? grad_avg, Tensor(d!)? momentum_buffer, "
    "*, float lr, float alpha, float eps, float weight_decay, float momentum, bool eps_inside_sqrt, bool decoupled, "
    "bool lr_in_momentum, bool maximize) -> ()",
    "adadelta_(Tensor(a!) param, Tensor grad, Tensor(b!) square_avg, Tensor(c!) acc_delta, *, float lr, float rho, "
    "float eps, float weight_decay, bool maximize) -> ()",
    "adagrad_(Tensor(a!) param, Tensor grad, Tensor(b!) square_sum, *, float lr, float eps, float weight_decay, "
    "bool decoupled, bool maximize) -> ()",
    "segment_add_(Tensor(a!) x, Tensor y, Tensor factors, Tensor starts, Tensor lengths, Tensor? ids) -> ()",
)
_library.define("segment_dot(Tensor a, Tensor b, Tensor starts, Tensor lengths, Tensor? ids) -> Tensor")


def _in_place_only(*args: object, **kwargs: object) -> None:
    """Shapes do not change and nothing is returned: all that tracing needs to know."""


def _register(name: str, *, cpu: Callable[..., Any] | None = None, cuda: Callable[..., Any] | None = None) -> None:
    """The reference for every device, and what is better where there is something better."""
    _library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
    for key, kernel in (("CPU", cpu), ("CUDA", cuda)):
        if kernel is not None:
            _library.impl(name, kernel, key)


for _schema in _SCHEMAS:
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _in_place_only, "Meta")
_library.impl("segment_dot", lambda a, b, starts, lengths, ids: a.new_empty(starts.numel()), "Meta")

_register("sgd_", cpu=aten_fused.sgd_, cuda=aten_fused.sgd_)
_register("adam_", cpu=aten_fused.adam_, cuda=aten_fused.adam_)
for _name in ("adam_direction_", "rmsprop_", "adadelta_", "adagrad_"):
    _register(_name)
_register("segment_dot", cpu=cpu.segment_dot if cpu.available else None)
_register("segment_add_", cpu=cpu.segment_add_ if cpu.available else None)


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
    grad_scale: Tensor | None = None,
) -> None:
    """One step of stochastic gradient descent, by torch.optim.SGD's rule.

    ::

        g ← ±g + weight_decay · p
        b ← g                                   if first
        b ← momentum · b + (1 − dampening) · g  else
        p ← p − lr · (g + momentum · b  if nesterov else  b)

    Args:
        param: θ, updated in place.
        grad: Divided by ``grad_scale`` where there is one.
        momentum_buffer: b, updated in place; None without momentum.
        lr: Learning rate.
        momentum: Of b.
        dampening: Of the gradient's share in b.
        weight_decay: L2 penalty.
        nesterov: Look ahead.
        maximize: Ascend instead.
        first: b has never been written.
        grad_scale: One float32 number that the gradients are divided by, in place; None: they are not written.
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
        grad_scale=grad_scale,
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
    grad_scale: Tensor | None = None,
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
        grad: Divided by ``grad_scale`` where there is one.
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
        grad_scale: One float32 number that the gradients are divided by, in place; None: they are not written.
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
        grad_scale=grad_scale,
    )


def adam_direction_(
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
    bias_correction1: float = 1.0,
    bias_correction2: float = 1.0,
    l2: float = 0.0,
    decay: float = 0.0,
    grad_divisor: Tensor | None = None,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """Update Adam's moments and compute where to go, without going: for rules that rescale the step afterwards.

    ::

        g ← ±g / grad_divisor + l2 · p
        m ← beta1 · m + beta3 · g
        v ← beta2 · v + (1 − beta2) · g²
        direction ← n / bias_correction1 / (sqrt(v) / sqrt(bias_correction2) + eps) + decay · p

    with n = m, or beta1 · m + beta3 · g for ``nesterov``.

    Args:
        direction: Written; dtype of the moments.
        param: θ, not written.
        grad: Not written.
        exp_avg: m, updated in place.
        exp_avg_sq: v, updated in place.
        beta1: Decay of m.
        beta2: Decay of v.
        beta3: The gradient's share in m.
        eps: Added to the denominator.
        bias_correction1: 1 − beta1^step, or 1.
        bias_correction2: 1 − beta2^step, or 1.
        l2: Penalty added to the gradient.
        decay: Decay added to the direction.
        grad_divisor: 0-dim; None: 1.
        nesterov: Look ahead.
        maximize: Ascend instead.
    """
    torch.ops.apex_npu.adam_direction_(
        direction,
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        beta1=beta1,
        beta2=beta2,
        beta3=beta3,
        eps=eps,
        bias_correction1=bias_correction1,
        bias_correction2=bias_correction2,
        l2=l2,
        decay=decay,
        grad_divisor=grad_divisor,
        nesterov=nesterov,
        maximize=maximize,
    )


def rmsprop_(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    grad_avg: Tensor | None,
    momentum_buffer: Tensor | None,
    *,
    lr: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    eps_inside_sqrt: bool = False,
    decoupled: bool = False,
    lr_in_momentum: bool = False,
    maximize: bool = False,
) -> None:
    """One step of RMSprop, torch.optim's or TensorFlow's.

    ::

        p ← p − weight_decay · p           if decoupled,   else  g ← ±g + weight_decay · p
        s ← alpha · s + (1 − alpha) · g²
        a ← alpha · a + (1 − alpha) · g    where grad_avg is given (centered); then s below is s − a²
        d ← sqrt(s + eps)                  if eps_inside_sqrt,   else  sqrt(s) + eps
        p ← p − lr · g / d                 without momentum
        b ← momentum · b + lr · g / d;  p ← p − b        with, if lr_in_momentum
        b ← momentum · b + g / d;       p ← p − lr · b   with, else

    Args:
        param: θ, updated in place.
        grad: Not written.
        square_avg: s, updated in place.
        grad_avg: a, updated in place; None: not centered.
        momentum_buffer: b, updated in place; None: no momentum.
        lr: Learning rate.
        alpha: Decay of s and a.
        eps: See above.
        weight_decay: L2 penalty, or decoupled decay; the latter is not multiplied with lr.
        momentum: Of b.
        eps_inside_sqrt: TensorFlow's way.
        decoupled: Decay the parameter instead of adding to the gradient.
        lr_in_momentum: TensorFlow's way.
        maximize: Ascend instead.
    """
    torch.ops.apex_npu.rmsprop_(
        param,
        grad,
        square_avg,
        grad_avg,
        momentum_buffer,
        lr=lr,
        alpha=alpha,
        eps=eps,
        weight_decay=weight_decay,
        momentum=momentum,
        eps_inside_sqrt=eps_inside_sqrt,
        decoupled=decoupled,
        lr_in_momentum=lr_in_momentum,
        maximize=maximize,
    )


def adadelta_(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    acc_delta: Tensor,
    *,
    lr: float,
    rho: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> None:
    """One step of Adadelta (Zeiler 2012, https://arxiv.org/abs/1212.5701).

    ::

        g ← ±g + weight_decay · p
        s ← rho · s + (1 − rho) · g²
        δ ← sqrt(a + eps) / sqrt(s + eps) · g
        a ← rho · a + (1 − rho) · δ²
        p ← p − lr · δ

    Args:
        param: θ, updated in place.
        grad: Not written.
        square_avg: s, updated in place.
        acc_delta: a, updated in place.
        lr: Learning rate.
        rho: Decay of s and a.
        eps: See above.
        weight_decay: L2 penalty.
        maximize: Ascend instead.
    """
    torch.ops.apex_npu.adadelta_(
        param,
        grad,
        square_avg,
        acc_delta,
        lr=lr,
        rho=rho,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
    )


def adagrad_(
    param: Tensor,
    grad: Tensor,
    square_sum: Tensor,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = False,
    maximize: bool = False,
) -> None:
    """One step of Adagrad (Duchi et al. 2011, https://jmlr.org/papers/v12/duchi11a.html).

    ::

        g ← ±g + weight_decay · p                       unless decoupled
        s ← s + g²
        p ← p − lr · (g / (sqrt(s) + eps) [+ weight_decay · p  if decoupled])

    Args:
        param: θ, updated in place.
        grad: Not written.
        square_sum: s, updated in place.
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: L2 penalty, or decoupled decay.
        decoupled: Which of the two.
        maximize: Ascend instead.
    """
    torch.ops.apex_npu.adagrad_(
        param, grad, square_sum, lr=lr, eps=eps, weight_decay=weight_decay, decoupled=decoupled, maximize=maximize
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
