# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every op in plain torch: the kernel wherever there is no better one, and what the better ones are tested against.

The arithmetic is that of the state's dtype, float32 for low-precision parameters, rounded once on the way back. Buffers
are walked in chunks that stay in the cache, so no temporary grows with the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
# What can be stepped and gathered.
FLOATS = LOW_PRECISION | {torch.float32, torch.float64}

# Large enough to hide Python, small enough that a chunk of every operand stays in a core's cache. An accelerator has no
# such cache but a launch cost, hence larger there.
_CHUNK_NUMEL = 1 << 16
_CHUNK_NUMEL_ACCELERATOR = 1 << 26

# Partial sums of one segment.
_MAX_LANES = 1 << 14


# Of operands, each a tensor or None: Any, since what is given as a tensor comes back as one.
def _chunks(tensors: tuple[Tensor | None, ...]) -> Iterator[tuple[Any, ...]]:
    first = tensors[0]
    assert first is not None
    chunk_numel = _CHUNK_NUMEL if first.device.type == "cpu" else _CHUNK_NUMEL_ACCELERATOR
    for begin in range(0, first.numel(), chunk_numel):
        end = min(begin + chunk_numel, first.numel())
        yield tuple(None if t is None else t[begin:end] for t in tensors)


def _in_dtype(grad: Tensor, dtype: torch.dtype, maximize: bool, grad_scale: Tensor | None = None) -> Tensor:
    if grad_scale is not None:
        # Widened first: in float16 a small gradient would be lost.
        unscaled = grad.to(dtype).mul(grad_scale.reciprocal())
        grad.copy_(unscaled)
        grad = unscaled
    grad = grad.to(dtype)
    return grad.neg() if maximize else grad


def _write_back(param: Tensor, value: Tensor) -> None:
    if value is not param:
        param.copy_(value)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of ``dtype`` are updated in, and their state kept in: float32 for the low-precision ones."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


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
    """See ``apex_npu.ops.schemas.sgd_``."""
    compute_dtype = wide_dtype(param.dtype)
    for p_chunk, g_chunk, b in _chunks((param, grad, momentum_buffer)):
        p = p_chunk.to(compute_dtype)
        update = _in_dtype(g_chunk, compute_dtype, maximize, grad_scale)
        if weight_decay:
            update = update.add(p, alpha=weight_decay)
        if b is not None:
            if first:
                b.copy_(update)
            else:
                b.mul_(momentum).add_(update, alpha=1 - dampening)
            update = update.add(b, alpha=momentum) if nesterov else b
        p.add_(update, alpha=-lr)
        _write_back(p_chunk, p)


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
    """See ``apex_npu.ops.schemas.adam_``."""
    step_size = lr / (1 - beta1**step)
    bias_correction2_sqrt = (1 - beta2**step) ** 0.5
    for p_chunk, g_chunk, m, v, v_max in _chunks((param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq)):
        p = p_chunk.to(exp_avg.dtype)
        g = _in_dtype(g_chunk, exp_avg.dtype, maximize, grad_scale)
        if weight_decay and decoupled:
            p.mul_(1 - lr * weight_decay)
        elif weight_decay:
            g = g.add(p, alpha=weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if v_max is not None:
            torch.maximum(v_max, v, out=v_max)
        denom = (v if v_max is None else v_max).sqrt().div_(bias_correction2_sqrt).add_(eps)
        p.addcdiv_(m, denom, value=-step_size)
        _write_back(p_chunk, p)


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
    bias_correction1: float,
    bias_correction2: float,
    l2: float,
    decay: float,
    grad_divisor: Tensor | None,
    nesterov: bool,
    maximize: bool,
) -> None:
    """See ``apex_npu.ops.schemas.adam_direction_``."""
    for u, p_chunk, g_chunk, m, v in _chunks((direction, param, grad, exp_avg, exp_avg_sq)):
        p = p_chunk.to(exp_avg.dtype)
        g = _in_dtype(g_chunk, exp_avg.dtype, maximize)
        if grad_divisor is not None:
            g = g / grad_divisor
        if l2:
            g = g.add(p, alpha=l2)
        m.mul_(beta1).add_(g, alpha=beta3)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denom = torch.sqrt(v).div_(bias_correction2**0.5).add_(eps)
        numerator = torch.mul(m, beta1).add_(g, alpha=beta3) if nesterov else m
        torch.div(numerator, denom, out=u)
        if bias_correction1 != 1.0:
            u.div_(bias_correction1)
        if decay:
            u.add_(p, alpha=decay)


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
    eps_inside_sqrt: bool,
    decoupled: bool,
    lr_in_momentum: bool,
    maximize: bool,
) -> None:
    """See ``apex_npu.ops.schemas.rmsprop_``."""
    for p_chunk, g_chunk, s, mean, b in _chunks((param, grad, square_avg, grad_avg, momentum_buffer)):
        p = p_chunk.to(square_avg.dtype)
        g = _in_dtype(g_chunk, square_avg.dtype, maximize)
        if weight_decay and decoupled:
            p.mul_(1 - weight_decay)
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
            p.addcdiv_(g, denom, value=-lr)
        elif lr_in_momentum:
            p.sub_(b.mul_(momentum).addcdiv_(g, denom, value=lr))
        else:
            p.add_(b.mul_(momentum).addcdiv_(g, denom), alpha=-lr)
        _write_back(p_chunk, p)


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
    maximize: bool,
) -> None:
    """See ``apex_npu.ops.schemas.adadelta_``."""
    for p_chunk, g_chunk, s, a in _chunks((param, grad, square_avg, acc_delta)):
        p = p_chunk.to(square_avg.dtype)
        g = _in_dtype(g_chunk, square_avg.dtype, maximize)
        if weight_decay:
            g = g.add(p, alpha=weight_decay)
        s.mul_(rho).addcmul_(g, g, value=1 - rho)
        delta = a.add(eps).sqrt_().div_(s.add(eps).sqrt_()).mul_(g)
        a.mul_(rho).addcmul_(delta, delta, value=1 - rho)
        p.add_(delta, alpha=-lr)
        _write_back(p_chunk, p)


def adagrad_(
    param: Tensor,
    grad: Tensor,
    square_sum: Tensor,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    """See ``apex_npu.ops.schemas.adagrad_``."""
    for p_chunk, g_chunk, s in _chunks((param, grad, square_sum)):
        p = p_chunk.to(square_sum.dtype)
        g = _in_dtype(g_chunk, square_sum.dtype, maximize)
        if weight_decay and not decoupled:
            g = g.add(p, alpha=weight_decay)
        s.addcmul_(g, g)
        denom = s.sqrt().add_(eps)
        if weight_decay and decoupled:
            p.mul_(1 - lr * weight_decay)
        p.addcdiv_(g, denom, value=-lr)
        _write_back(p_chunk, p)


def segment_dot(a: Tensor, b: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None) -> Tensor:
    """See ``apex_npu.ops.schemas.segment_dot``."""
    ids = segment_ids(starts, lengths, a.numel(), a.device) if ids is None else ids
    products = a * b
    # An NPU has no float64 to speak of; elsewhere it costs little, and long sums need it.
    wide = products if a.device.type == "npu" else products.double()
    # Each segment has many partial sums: in a single float32 one, the millionth element would hardly count.
    count = starts.numel() + 1
    lanes = max(1, min(_MAX_LANES, a.numel() // (4 * count)))
    whole = a.numel() - a.numel() % lanes
    partial = wide.new_zeros(count, lanes)
    partial.scatter_add_(0, ids[:whole].view(-1, lanes), wide[:whole].view(-1, lanes))
    sums = partial.sum(1).index_add_(0, ids[whole:], wide[whole:])
    return sums[:-1].to(a.dtype)


def segment_add_(x: Tensor, y: Tensor, factors: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None) -> None:
    """See ``apex_npu.ops.schemas.segment_add_``."""
    ids = segment_ids(starts, lengths, x.numel(), x.device) if ids is None else ids
    x.addcmul_(y, torch.cat([factors, factors.new_zeros(1)])[ids])


def segment_ids(starts: Tensor, lengths: Tensor, numel: int, device: torch.device) -> Tensor:
    """For each of ``numel`` elements the index of its segment, or ``len(starts)`` outside all of them (int64)."""
    count = starts.numel()
    ids = torch.full((numel,), count, dtype=torch.int64)
    # Every covered element in order of segments: its position, and whose it is.
    owner = torch.repeat_interleave(torch.arange(count), lengths)
    before = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = torch.arange(owner.numel()) - before + torch.repeat_interleave(starts, lengths)
    ids[positions] = owner
    return ids.to(device)
