# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules that treat each element on its own.

Each function declares an op, see ``dispatch.py``: its body is the reference kernel, in plain torch. Buffers are
processed in chunks that stay in the cache, so no temporary grows with the model.

All ops work in place on 1-D buffers of one length and device. States have the dtype of the parameters, or float32
for float16 and bfloat16 parameters. Gradients have the dtype of the parameters, or float16 or bfloat16 for float32
parameters. The ops compute in the dtype of the states and round each result once. Several ops share these arguments:

- ``grad``: The gradient. It is never written.
- ``grad_scale``: One number, a float32 or float64 tensor, that gradients are divided by first: the loss scale, divided
  by the factor of gradient clipping. None stands for 1.
- ``lr``, ``step``: Numbers, or tensors of one element on the buffers' device, which are read there without a wait. A
  CUDA graph that was captured with tensors reads their current values at each replay.
- ``found_inf``: One element on the buffers' device; if it is not 0, nothing is written. None stands for 0.
- ``encoding``: How parameters and states are stored in fewer bytes. None: as above.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex_npu.ops.dispatch import Mutated, Rule
from apex_npu.ops.encoded_calls import RunEncoding
from apex_npu.ops.reference import (
    add_,
    bias_correction_of,
    chunks,
    in_dtype,
    subtract_quotient_,
    wide_dtype,
    write_back,
)


@Rule
def sgd_(
    param: Mutated,
    grad: Tensor,
    momentum_buffer: Mutated | None,
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
    encoding: RunEncoding | None = None,
) -> None:
    """One step of stochastic gradient descent, by torch.optim.SGD's rule.

    ::

        p ← p − lr · weight_decay · p           if decoupled,   else  g ← ±g + weight_decay · p
        b ← g                                   if step = 1
        b ← momentum · b + (1 − dampening) · g  else
        p ← p − lr · ((1 − dampening) · g + momentum · b  if nesterov else  b)

    Args:
        param: θ, updated in place.
        grad: g.
        momentum_buffer: b, updated in place; None without momentum.
        lr: The learning rate.
        momentum: The decay of b.
        dampening: The share of the gradient that is left out.
        weight_decay: The L2 penalty, or the decoupled decay.
        nesterov: Use Nesterov's momentum.
        maximize: Step along the gradient instead of against it.
        step: The number of this update, from 1.
        decoupled: Decay the parameters instead of adding the penalty to the gradient.
        grad_scale: The divisor of gradients; see the module.
        found_inf: The flag that prevents writing; see the module.
        encoding: The encoding of the operands; see the module.
    """
    compute_dtype = wide_dtype(param.dtype)
    for p_chunk, g_chunk, b in chunks((param, grad, momentum_buffer)):
        p = p_chunk.to(compute_dtype)
        update = in_dtype(g_chunk, compute_dtype, maximize, grad_scale)
        if weight_decay and decoupled:
            p.mul_(1 - lr * weight_decay)
        elif weight_decay:
            update = update.add(p, alpha=weight_decay)
        if b is not None:
            if isinstance(step, Tensor):
                later = b.mul(momentum).add_(update, alpha=1 - dampening)
                torch.where(step == 1, update, later, out=b)
            elif step == 1:
                b.copy_(update)
            else:
                b.mul_(momentum).add_(update, alpha=1 - dampening)
            if not nesterov:
                update = b
            elif dampening:
                update = update.mul(1 - dampening).add_(b, alpha=momentum)
            else:
                update = update.add(b, alpha=momentum)
        add_(p, update, -lr)
        write_back(p_chunk, p)


@Rule
def adam_(
    param: Mutated,
    grad: Tensor,
    exp_avg: Mutated,
    exp_avg_sq: Mutated,
    max_exp_avg_sq: Mutated | None,
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
    encoding: RunEncoding | None = None,
) -> None:
    """One step of Adam (Kingma & Ba 2014, https://arxiv.org/abs/1412.6980) or AdamW.

    ::

        p ← p − lr · weight_decay · p      if decoupled,   else  g ← ±g + weight_decay · p
        m ← beta1 · m + (1 − beta1) · g
        v ← beta2 · v + (1 − beta2) · g²
        p ← p − lr / (1 − beta1^step) · m / (sqrt(v̂) / sqrt(1 − beta2^step) + eps)

    where v̂ = v, or the running maximum of v if ``max_exp_avg_sq`` is given (AMSGrad, of the uncorrected v as in
    torch). Without ``bias_correction``, 1 − beta1^step and 1 − beta2^step are replaced by 1.

    Args:
        param: θ, updated in place.
        grad: g.
        exp_avg: m, updated in place.
        exp_avg_sq: v, updated in place.
        max_exp_avg_sq: The running maximum of v, updated in place; None without AMSGrad.
        lr: The learning rate.
        beta1: The decay of m.
        beta2: The decay of v.
        eps: The number added to the denominator.
        weight_decay: The L2 penalty, or the decoupled decay (Loshchilov & Hutter 2017,
            https://arxiv.org/abs/1711.05101).
        decoupled: Decay the parameters instead of adding the penalty to the gradient.
        maximize: Step along the gradient instead of against it.
        step: The number of this update, from 1.
        bias_correction: Correct m and v for their start at 0.
        grad_scale: The divisor of gradients; see the module.
        found_inf: The flag that prevents writing; see the module.
        encoding: The encoding of the operands; see the module.
    """
    step_size = lr / bias_correction_of(beta1, step) if bias_correction else lr
    root_correction2 = bias_correction_of(beta2, step) ** 0.5 if bias_correction else 1.0
    operands = (param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq)
    for p_chunk, g_chunk, m, v, v_max in chunks(operands):
        p = p_chunk.to(exp_avg.dtype)
        g = in_dtype(g_chunk, exp_avg.dtype, maximize, grad_scale)
        if weight_decay and decoupled:
            p.mul_(1 - lr * weight_decay)
        elif weight_decay:
            g = g.add(p, alpha=weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if v_max is not None:
            torch.maximum(v_max, v, out=v_max)
        denom = (v if v_max is None else v_max).sqrt()
        if isinstance(root_correction2, Tensor) or root_correction2 != 1.0:
            denom.div_(root_correction2)
        subtract_quotient_(p, m, denom.add_(eps), step_size)
        write_back(p_chunk, p)


@Rule
def rmsprop_(
    param: Mutated,
    grad: Tensor,
    square_avg: Mutated,
    grad_avg: Mutated | None,
    momentum_buffer: Mutated | None,
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
    encoding: RunEncoding | None = None,
) -> None:
    """One step of RMSprop, torch.optim's or TensorFlow's.

    ::

        p ← p − weight_decay · p           if decoupled and lr ≠ 0;   unless decoupled  g ← ±g + weight_decay · p
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
        grad_avg: a, updated in place; None if not centered.
        momentum_buffer: b, updated in place; None without momentum.
        lr: The learning rate.
        alpha: The decay of s and a.
        eps: The number added to the denominator, inside or outside of the root.
        weight_decay: The L2 penalty, or the decoupled decay. The latter is not multiplied by lr, but a step with lr = 0
            does not move parameters, because torch.distributed.checkpoint makes such a step to create the state.
        momentum: The decay of b.
        eps_inside_sqrt: Add eps inside of the root, as TensorFlow does.
        decoupled: Decay the parameters instead of adding the penalty to the gradient.
        lr_in_momentum: Multiply by lr before adding to b, as TensorFlow does.
        maximize: Step along the gradient instead of against it.
        grad_scale: The divisor of gradients; see the module.
        found_inf: The flag that prevents writing; see the module.
        encoding: The encoding of the operands; see the module.
    """
    operands = (param, grad, square_avg, grad_avg, momentum_buffer)
    for p_chunk, g_chunk, s, mean, b in chunks(operands):
        p = p_chunk.to(square_avg.dtype)
        g = in_dtype(g_chunk, square_avg.dtype, maximize, grad_scale)
        if weight_decay and decoupled:
            p.mul_(1 - weight_decay * (lr != 0))
        elif weight_decay:
            g = g.add(p, alpha=weight_decay)
        s.mul_(alpha).addcmul_(g, g, value=1 - alpha)
        if mean is None:
            denom = s.add(eps).sqrt_() if eps_inside_sqrt else s.sqrt().add_(eps)
        else:
            mean.lerp_(g, 1 - alpha)
            variance = s.addcmul(mean, mean, value=-1)
            denom = variance.add_(eps).sqrt_() if eps_inside_sqrt else variance.sqrt_().add_(eps)
        if b is None:
            subtract_quotient_(p, g, denom, lr)
        elif lr_in_momentum:
            subtract_quotient_(b.mul_(momentum), g, denom, -lr)
            p.sub_(b)
        else:
            add_(p, b.mul_(momentum).addcdiv_(g, denom), -lr)
        write_back(p_chunk, p)


@Rule
def adadelta_(
    param: Mutated,
    grad: Tensor,
    square_avg: Mutated,
    acc_delta: Mutated,
    *,
    lr: float | Tensor,
    rho: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    encoding: RunEncoding | None = None,
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
        lr: The learning rate.
        rho: The decay of s and a.
        eps: The number added inside of both roots.
        weight_decay: The L2 penalty.
        maximize: Step along the gradient instead of against it.
        grad_scale: The divisor of gradients; see the module.
        found_inf: The flag that prevents writing; see the module.
        encoding: The encoding of the operands; see the module.
    """
    for p_chunk, g_chunk, s, a in chunks((param, grad, square_avg, acc_delta)):
        p = p_chunk.to(square_avg.dtype)
        g = in_dtype(g_chunk, square_avg.dtype, maximize, grad_scale)
        if weight_decay:
            g = g.add(p, alpha=weight_decay)
        s.mul_(rho).addcmul_(g, g, value=1 - rho)
        delta = a.add(eps).sqrt_().div_(s.add(eps).sqrt_()).mul_(g)
        a.mul_(rho).addcmul_(delta, delta, value=1 - rho)
        add_(p, delta, -lr)
        write_back(p_chunk, p)


@Rule
def adagrad_(
    param: Mutated,
    grad: Tensor,
    sum: Mutated,
    *,
    lr: float | Tensor,
    eps: float,
    weight_decay: float,
    decoupled: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    encoding: RunEncoding | None = None,
) -> None:
    """One step of Adagrad (Duchi et al. 2011, https://jmlr.org/papers/v12/duchi11a.html).

    ::

        g ← ±g + weight_decay · p                       unless decoupled
        s ← s + g²
        p ← p − lr · (g / (sqrt(s) + eps) [+ weight_decay · p  if decoupled])

    Args:
        param: θ, updated in place.
        grad: g.
        sum: s, updated in place.
        lr: The learning rate.
        eps: The number added to the denominator.
        weight_decay: The L2 penalty, or the decoupled decay.
        decoupled: Decay the parameters instead of adding the penalty to the gradient.
        maximize: Step along the gradient instead of against it.
        grad_scale: The divisor of gradients; see the module.
        found_inf: The flag that prevents writing; see the module.
        encoding: The encoding of the operands; see the module.
    """
    for p_chunk, g_chunk, s in chunks((param, grad, sum)):
        p = p_chunk.to(sum.dtype)
        g = in_dtype(g_chunk, sum.dtype, maximize, grad_scale)
        if weight_decay and not decoupled:
            g = g.add(p, alpha=weight_decay)
        s.addcmul_(g, g)
        denom = s.sqrt().add_(eps)
        if weight_decay and decoupled:
            p.mul_(1 - lr * weight_decay)
        subtract_quotient_(p, g, denom, lr)
        write_back(p_chunk, p)


RULES = (sgd_, adam_, rmsprop_, adadelta_, adagrad_)
