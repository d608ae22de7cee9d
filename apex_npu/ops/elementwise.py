# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules of which each element goes by itself.

All ops work in place on 1-D buffers of one length and device. States have the dtype of the parameters, or float32
beside float16 and bfloat16; gradients have it, too, or float16 or bfloat16 beside float32. What is computed is computed
in the states' dtype, and rounded once. What several of them take:

- ``grad``: never written.
- ``grad_scale``: one number, a float32 or float64 tensor, that gradients are divided by first: the loss scale, over
  what clipping multiplies with. None: 1.
- ``model_param``: of float16 or bfloat16; gets the new ``param``, rounded. None: nobody wants it.
- ``lr``, ``step``: numbers, or tensors of one element on the buffers' device, which does not wait to be asked then. A
  CUDA graph that was captured with tensors finds in them at each replay what they are by then.
- ``found_inf``: one element, likewise; where it is not 0, nothing is written. None: there is no such flag.
"""

from __future__ import annotations

from torch import Tensor

from apex_npu.ops.calls import call


def sgd_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    model_param: Tensor | None = None,
    *,
    lr: float | Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    step: int | Tensor,
    decoupled: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of stochastic gradient descent, by torch.optim.SGD's rule.

    ::

        p ← p − lr · weight_decay · p           if decoupled,   else  g ← ±g + weight_decay · p
        b ← g                                   if step = 1
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
        step: Number of this update, from 1.
        decoupled: Which of the two.
        grad_scale: See the module.
        found_inf: See the module.
    """
    call(
        "sgd_",
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
        step=step,
        decoupled=decoupled,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    model_param: Tensor | None = None,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    step: int | Tensor,
    bias_correction: bool = True,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
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
        found_inf: See the module.
    """
    call(
        "adam_",
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
        found_inf=found_inf,
    )


def rmsprop_(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    grad_avg: Tensor | None,
    momentum_buffer: Tensor | None,
    model_param: Tensor | None = None,
    *,
    lr: float | Tensor,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    eps_inside_sqrt: bool = False,
    decoupled: bool = False,
    lr_in_momentum: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
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
        found_inf: See the module.
    """
    call(
        "rmsprop_",
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
        found_inf=found_inf,
    )


def adadelta_(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    acc_delta: Tensor,
    model_param: Tensor | None = None,
    *,
    lr: float | Tensor,
    rho: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
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
        found_inf: See the module.
    """
    call(
        "adadelta_",
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
        found_inf=found_inf,
    )


def adagrad_(
    param: Tensor,
    grad: Tensor,
    square_sum: Tensor,
    model_param: Tensor | None = None,
    *,
    lr: float | Tensor,
    eps: float,
    weight_decay: float,
    decoupled: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
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
        found_inf: See the module.
    """
    call(
        "adagrad_",
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
        found_inf=found_inf,
    )
