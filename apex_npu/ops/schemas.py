# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every op once: its schema, its shape-only twin for tracing, which kernel runs where, and a typed Python function.

All ops work in place on 1-D buffers of one length and device. States have the dtype of the parameters, or float32
beside float16 and bfloat16; gradients have it, too, or float16 or bfloat16 beside float32. What is computed is computed
in the states' dtype, and rounded once. What several of them take:

- ``grad``: never written.
- ``grad_scale``: one number, a float32 or float64 tensor, that gradients are divided by first: the loss scale, over
  what clipping multiplies with. None: 1.
- ``model_param``: of float16 or bfloat16; gets the new ``param``, rounded. None: nobody wants it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from apex_npu.ops import aten_fused, cpu, cuda, npu, reference, reference_segments
from apex_npu.ops.segments import Segments

_library = torch.library.Library("apex_npu", "DEF")  # lives as long as the process

_SCHEMAS = (
    "sgd_(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, Tensor(c!)? model_param, *, float lr, "
    "float momentum, float dampening, float weight_decay, bool nesterov, bool maximize, bool first, "
    "bool decoupled=False, Tensor? grad_scale=None) -> ()",
    "adam_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? max_exp_avg_sq, "
    "Tensor(e!)? model_param, *, float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, "
    "bool maximize, int step, bool bias_correction=True, Tensor? grad_scale=None) -> ()",
    "rmsprop_(Tensor(a!) param, Tensor grad, Tensor(b!) square_avg, Tensor(c!)? grad_avg, Tensor(d!)? momentum_buffer, "
    "Tensor(e!)? model_param, *, float lr, float alpha, float eps, float weight_decay, float momentum, "
    "bool eps_inside_sqrt, bool decoupled, bool lr_in_momentum, bool maximize, Tensor? grad_scale=None) -> ()",
    "adadelta_(Tensor(a!) param, Tensor grad, Tensor(b!) square_avg, Tensor(c!) acc_delta, Tensor(d!)? model_param, *, "
    "float lr, float rho, float eps, float weight_decay, bool maximize, Tensor? grad_scale=None) -> ()",
    "adagrad_(Tensor(a!) param, Tensor grad, Tensor(b!) square_sum, Tensor(c!)? model_param, *, float lr, float eps, "
    "float weight_decay, bool decoupled, bool maximize, Tensor? grad_scale=None) -> ()",
    "lamb_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? model_param, "
    "Tensor(e!) direction, Tensor starts, Tensor lengths, Tensor? ids, *, float lr, float beta1, float beta2, "
    "float beta3, float eps, float bias_correction1, float bias_correction2, float l2, float decay, bool adapt, "
    "float max_weight_norm, bool maximize, Tensor? grad_scale=None) -> ()",
    "adamp_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? model_param, "
    "Tensor(e!) direction, Tensor starts, Tensor lengths, Tensor? ids, Tensor owner, Tensor row_limit, "
    "Tensor whole_limit, *, float lr, float beta1, float beta2, float eps, float weight_decay, float wd_ratio, "
    "bool nesterov, bool maximize, int step, Tensor? grad_scale=None) -> ()",
    "segment_add_(Tensor(a!) x, Tensor y, Tensor factors, Tensor starts, Tensor lengths, Tensor? ids) -> ()",
)
_library.define("segment_dot(Tensor a, Tensor b, Tensor starts, Tensor lengths, Tensor? ids) -> Tensor")
_library.define("norm(Tensor x) -> Tensor")


def _in_place_only(*args: object, **kwargs: object) -> None:
    """Shapes do not change and nothing is returned: all that tracing needs to know."""


# For each device a module that may have a kernel. Those of the extension are registered by cpu.py.
_KERNELS = {"CUDA": cuda, "PrivateUse1": npu}
if not cpu.available:
    _KERNELS["CPU"] = aten_fused


def _register(reference: ModuleType, names: Sequence[str]) -> None:
    """The reference for every device, and what is better where there is something better."""
    for name in names:
        _library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
        for key, kernels in _KERNELS.items():
            if hasattr(kernels, name):
                _library.impl(name, getattr(kernels, name), key)


for _schema in _SCHEMAS:
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _in_place_only, "Meta")
_library.impl("segment_dot", lambda a, b, starts, lengths, ids: a.new_empty(starts.numel()), "Meta")
_library.impl("norm", lambda x: x.new_empty((), dtype=reference.wide_dtype(x.dtype)), "Meta")

_register(reference, ("sgd_", "adam_", "rmsprop_", "adadelta_", "adagrad_", "norm"))
_register(reference_segments, ("lamb_", "adamp_", "segment_dot", "segment_add_"))
_cpu_kernels = cpu.register()  # lives as long as _library


def sgd_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    model_param: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
    decoupled: bool = False,
    grad_scale: Tensor | None = None,
) -> None:
    """One step of stochastic gradient descent, by torch.optim.SGD's rule.

    ::

        p ← p − lr · weight_decay · p           if decoupled,   else  g ← ±g + weight_decay · p
        b ← g                                   if first
        b ← momentum · b + (1 − dampening) · g  else
        p ← p − lr · (g + momentum · b  if nesterov else  b)

    Args:
        param: θ, updated in place.
        grad: g.
        momentum_buffer: b, updated in place; None without momentum.
        model_param: See the module.
        lr: Learning rate.
        momentum: Of b.
        dampening: Of the gradient's share in b.
        weight_decay: L2 penalty, or decoupled decay.
        nesterov: Look ahead.
        maximize: Ascend instead.
        first: b has never been written.
        decoupled: Which of the two.
        grad_scale: See the module.
    """
    torch.ops.apex_npu.sgd_(
        param,
        grad,
        momentum_buffer,
        model_param,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        first=first,
        decoupled=decoupled,
        grad_scale=grad_scale,
    )


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    model_param: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    step: int,
    bias_correction: bool = True,
    grad_scale: Tensor | None = None,
) -> None:
    """One step of Adam (Kingma & Ba 2014, https://arxiv.org/abs/1412.6980) or AdamW.

    ::

        p ← p − lr · weight_decay · p      if decoupled,   else  g ← ±g + weight_decay · p
        m ← beta1 · m + (1 − beta1) · g
        v ← beta2 · v + (1 − beta2) · g²
        p ← p − lr / (1 − beta1^step) · m / (sqrt(v̂) / sqrt(1 − beta2^step) + eps)

    with v̂ = v, or the running maximum of v where ``max_exp_avg_sq`` is given (AMSGrad, of the uncorrected v as in
    torch), and without ``bias_correction`` 1 for both of the brackets.

    Args:
        param: θ, updated in place.
        grad: g.
        exp_avg: m, updated in place.
        exp_avg_sq: v, updated in place.
        max_exp_avg_sq: Running maximum of v, updated in place; None without AMSGrad.
        model_param: See the module.
        lr: Learning rate.
        beta1: Decay of m.
        beta2: Decay of v.
        eps: Added to the denominator.
        weight_decay: L2 penalty, or decoupled decay (Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101).
        decoupled: Which of the two.
        maximize: Ascend instead.
        step: Number of this update, from 1.
        bias_correction: Correct m and v for their start.
        grad_scale: See the module.
    """
    torch.ops.apex_npu.adam_(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        model_param,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        step=step,
        bias_correction=bias_correction,
        grad_scale=grad_scale,
    )


def rmsprop_(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    grad_avg: Tensor | None,
    momentum_buffer: Tensor | None,
    model_param: Tensor | None = None,
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
    grad_scale: Tensor | None = None,
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
        grad: g.
        square_avg: s, updated in place.
        grad_avg: a, updated in place; None: not centered.
        momentum_buffer: b, updated in place; None: no momentum.
        model_param: See the module.
        lr: Learning rate.
        alpha: Decay of s and a.
        eps: See above.
        weight_decay: L2 penalty, or decoupled decay; the latter is not multiplied with lr.
        momentum: Of b.
        eps_inside_sqrt: TensorFlow's way.
        decoupled: Decay the parameter instead of adding to the gradient.
        lr_in_momentum: TensorFlow's way.
        maximize: Ascend instead.
        grad_scale: See the module.
    """
    torch.ops.apex_npu.rmsprop_(
        param,
        grad,
        square_avg,
        grad_avg,
        momentum_buffer,
        model_param,
        lr=lr,
        alpha=alpha,
        eps=eps,
        weight_decay=weight_decay,
        momentum=momentum,
        eps_inside_sqrt=eps_inside_sqrt,
        decoupled=decoupled,
        lr_in_momentum=lr_in_momentum,
        maximize=maximize,
        grad_scale=grad_scale,
    )


def adadelta_(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    acc_delta: Tensor,
    model_param: Tensor | None = None,
    *,
    lr: float,
    rho: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
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
        grad: g.
        square_avg: s, updated in place.
        acc_delta: a, updated in place.
        model_param: See the module.
        lr: Learning rate.
        rho: Decay of s and a.
        eps: See above.
        weight_decay: L2 penalty.
        maximize: Ascend instead.
        grad_scale: See the module.
    """
    torch.ops.apex_npu.adadelta_(
        param,
        grad,
        square_avg,
        acc_delta,
        model_param,
        lr=lr,
        rho=rho,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        grad_scale=grad_scale,
    )


def adagrad_(
    param: Tensor,
    grad: Tensor,
    square_sum: Tensor,
    model_param: Tensor | None = None,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
) -> None:
    """One step of Adagrad (Duchi et al. 2011, https://jmlr.org/papers/v12/duchi11a.html).

    ::

        g ← ±g + weight_decay · p                       unless decoupled
        s ← s + g²
        p ← p − lr · (g / (sqrt(s) + eps) [+ weight_decay · p  if decoupled])

    Args:
        param: θ, updated in place.
        grad: g.
        square_sum: s, updated in place.
        model_param: See the module.
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: L2 penalty, or decoupled decay.
        decoupled: Which of the two.
        maximize: Ascend instead.
        grad_scale: See the module.
    """
    torch.ops.apex_npu.adagrad_(
        param,
        grad,
        square_sum,
        model_param,
        lr=lr,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        grad_scale=grad_scale,
    )


def lamb_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    model_param: Tensor | None,
    direction: Tensor,
    segments: Segments,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    beta3: float,
    eps: float,
    bias_correction1: float = 1.0,
    bias_correction2: float = 1.0,
    l2: float = 0.0,
    decay: float = 0.0,
    adapt: bool = True,
    max_weight_norm: float = math.inf,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
) -> None:
    """One step of LAMB (You et al. 2019, https://arxiv.org/abs/1904.00962).

    ::

        g ← ±g + l2 · p
        m ← beta1 · m + beta3 · g
        v ← beta2 · v + (1 − beta2) · g²
        u ← m / bias_correction1 / (sqrt(v) / sqrt(bias_correction2) + eps) + decay · p
        p ← p − lr · r · u,   r = min(‖p‖, max_weight_norm) / ‖u‖  for each segment

    with r = 1 unless ``adapt``, and where either norm is 0. Padding between segments may be written.

    Args:
        param: θ, updated in place.
        grad: g.
        exp_avg: m, updated in place.
        exp_avg_sq: v, updated in place.
        model_param: See the module.
        direction: Memory for u, of the states' dtype; what it holds before and afterwards is arbitrary.
        segments: Where each parameter lies.
        lr: Learning rate.
        beta1: Decay of m.
        beta2: Decay of v.
        beta3: The gradient's share in m.
        eps: Added to the denominator.
        bias_correction1: 1 − beta1^step, or 1.
        bias_correction2: 1 − beta2^step, or 1.
        l2: Penalty added to the gradient.
        decay: Decay added to the direction.
        adapt: False keeps r at 1.
        max_weight_norm: ‖p‖ counts no more than this.
        maximize: Ascend instead.
        grad_scale: See the module.
    """
    torch.ops.apex_npu.lamb_(
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
        bias_correction1=bias_correction1,
        bias_correction2=bias_correction2,
        l2=l2,
        decay=decay,
        adapt=adapt,
        max_weight_norm=max_weight_norm,
        maximize=maximize,
        grad_scale=grad_scale,
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
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    wd_ratio: float,
    nesterov: bool,
    maximize: bool,
    step: int,
    grad_scale: Tensor | None = None,
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
        model_param: See the module.
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
        grad_scale: See the module.
    """
    torch.ops.apex_npu.adamp_(
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


def norm(x: Tensor) -> Tensor:
    """The 2-norm: 0-dim, float32 or wider, accumulated in float64 where the device has it.

    On the CPU it is finite wherever all elements are, unless it is itself too large for its dtype.

    Args:
        x: 1-D.
    """
    total: Tensor = torch.ops.apex_npu.norm(x)
    return total
