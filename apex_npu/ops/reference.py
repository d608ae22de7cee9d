# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every op in plain torch: the kernel wherever there is no better one, and what the better ones are tested against.

The arithmetic is that of the state's dtype, float32 for low-precision parameters, rounded once on the way back. Buffers
are walked in chunks that stay in the cache, so no temporary grows with the model.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from itertools import repeat
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
# Of sums in float32: with many more, elements of few bits would all be rounded the same way.
_ROW_NUMEL = 1 << 10
# Among the operands of a rule.
_GRAD_AT = 1


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, Tensor] = {}


_scratch = _Scratch()


# Of operands, each a tensor or None: Any, since what is given as a tensor comes back as one.
def chunks(tensors: tuple[Tensor | None, ...], numel: int | None = None) -> Iterator[tuple[Any, ...]]:
    """The operands, of one length, piece by piece; of ``numel`` elements each, by default what ``chunk_numel`` says."""
    first = tensors[0]
    assert first is not None
    step = numel or chunk_numel(first.device)
    if 0 < first.numel() <= step:
        yield tensors
    elif first.numel():
        yield from zip(*(repeat(None) if t is None else t.split(step) for t in tensors), strict=False)


def chunk_numel(device: torch.device) -> int:
    """How many elements are worth a call; a power of two."""
    return _CHUNK_NUMEL if device.type == "cpu" else _CHUNK_NUMEL_ACCELERATOR


def scratch(numel: int, like: Tensor) -> Tensor:
    """Memory for intermediate values of a chunk, of ``like``'s dtype, on its device; valid until the next call.

    On a CPU it is kept, by each thread for itself: fresh memory would have to be fetched into the cache first.
    """
    if like.device.type != "cpu":
        return torch.empty(numel, dtype=like.dtype, device=like.device)
    kept = _scratch.by_dtype
    found = kept.get(like.dtype)
    if found is None or found.numel() < numel:
        with torch.inference_mode(False):  # where it was made it may be written everywhere
            found = kept[like.dtype] = torch.empty(numel, dtype=like.dtype)
    return found[:numel]


def in_dtype(grad: Tensor, dtype: torch.dtype, maximize: bool, grad_scale: Tensor | None) -> Tensor:
    """What a rule steps by, in ``dtype``: ±grad / grad_scale."""
    grad = grad.to(dtype)  # widened first: divided in float16, a small gradient would be lost
    if grad_scale is not None:
        grad = grad / grad_scale.to(dtype)
    return grad.neg() if maximize else grad


def write_back(param: Tensor, value: Tensor, model_param: Tensor | None) -> None:
    """Round ``value`` into ``param`` and its low-precision copy, where they are not the same."""
    if value is not param:
        param.copy_(value)
    if model_param is not None:
        model_param.copy_(value)


def add_(to: Tensor, addend: Tensor, factor: float | Tensor) -> None:
    """Add ``factor`` times ``addend`` to ``to``."""
    if isinstance(factor, Tensor):
        to.addcmul_(addend, factor.to(to.dtype))
    else:
        to.add_(addend, alpha=factor)


def subtract_quotient_(to: Tensor, numerator: Tensor, denominator: Tensor, factor: float | Tensor) -> None:
    """Subtract ``factor`` times a quotient from ``to``. ``denominator`` holds anything afterwards."""
    if isinstance(factor, Tensor):
        to.sub_(torch.div(numerator, denominator, out=denominator).mul_(factor))
    else:
        to.addcdiv_(numerator, denominator, value=-factor)


def bias_correction_of(beta: float, step: int | Tensor) -> float | Tensor:
    """1 − beta^step. On a device in its float32, in which the power would leave but five digits of the first steps'."""
    if isinstance(step, Tensor):
        return torch.expm1(step.to(torch.float32) * (math.log(beta) if beta else -math.inf)).neg_()
    return 1 - beta**step


def skippable(written: int, *, chunked: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a rule the option ``found_inf``: where that is not 0, what has been written is as it was before.

    It costs copies of what is ``written``: so many operands, the first ones, without the gradient. They are of a chunk
    at a time where all operands are ``chunked``.
    """

    def decorate(rule: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(rule)
        def op(*operands: Any, found_inf: Tensor | None = None, **options: Any) -> None:
            if found_inf is None:
                rule(*operands, **options)
                return
            skipped = found_inf.reshape(()) != 0
            for pieces in chunks(operands) if chunked else (operands,):
                changing = [t for i, t in enumerate(pieces[: written + 1]) if i != _GRAD_AT and t is not None]
                before = [t.clone() for t in changing]
                rule(*pieces, **options)
                for now, then in zip(changing, before, strict=True):
                    torch.where(skipped, then, now, out=now)

        return op

    return decorate


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of ``dtype`` are updated in, and their state kept in: float32 for the low-precision ones."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


@skippable(3, chunked=True)
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
) -> None:
    """See ``apex_npu.ops.elementwise.sgd_``."""
    compute_dtype = wide_dtype(param.dtype)
    for p_chunk, g_chunk, b, model_chunk in chunks((param, grad, momentum_buffer, model_param)):
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
            update = update.add(b, alpha=momentum) if nesterov else b
        add_(p, update, -lr)
        write_back(p_chunk, p, model_chunk)


@skippable(5, chunked=True)
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
) -> None:
    """See ``apex_npu.ops.elementwise.adam_``."""
    step_size = lr / bias_correction_of(beta1, step) if bias_correction else lr
    root_correction2 = bias_correction_of(beta2, step) ** 0.5 if bias_correction else 1.0
    operands = (param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, model_param)
    for p_chunk, g_chunk, m, v, v_max, model_chunk in chunks(operands):
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
        write_back(p_chunk, p, model_chunk)


@skippable(5, chunked=True)
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
    eps_inside_sqrt: bool,
    decoupled: bool,
    lr_in_momentum: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
) -> None:
    """See ``apex_npu.ops.elementwise.rmsprop_``."""
    operands = (param, grad, square_avg, grad_avg, momentum_buffer, model_param)
    for p_chunk, g_chunk, s, mean, b, model_chunk in chunks(operands):
        p = p_chunk.to(square_avg.dtype)
        g = in_dtype(g_chunk, square_avg.dtype, maximize, grad_scale)
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
            subtract_quotient_(p, g, denom, lr)
        elif lr_in_momentum:
            subtract_quotient_(b.mul_(momentum), g, denom, -lr)
            p.sub_(b)
        else:
            add_(p, b.mul_(momentum).addcdiv_(g, denom), -lr)
        write_back(p_chunk, p, model_chunk)


@skippable(4, chunked=True)
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
    maximize: bool,
    grad_scale: Tensor | None = None,
) -> None:
    """See ``apex_npu.ops.elementwise.adadelta_``."""
    for p_chunk, g_chunk, s, a, model_chunk in chunks((param, grad, square_avg, acc_delta, model_param)):
        p = p_chunk.to(square_avg.dtype)
        g = in_dtype(g_chunk, square_avg.dtype, maximize, grad_scale)
        if weight_decay:
            g = g.add(p, alpha=weight_decay)
        s.mul_(rho).addcmul_(g, g, value=1 - rho)
        delta = a.add(eps).sqrt_().div_(s.add(eps).sqrt_()).mul_(g)
        a.mul_(rho).addcmul_(delta, delta, value=1 - rho)
        add_(p, delta, -lr)
        write_back(p_chunk, p, model_chunk)


@skippable(3, chunked=True)
def adagrad_(
    param: Tensor,
    grad: Tensor,
    square_sum: Tensor,
    model_param: Tensor | None = None,
    *,
    lr: float | Tensor,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
) -> None:
    """See ``apex_npu.ops.elementwise.adagrad_``."""
    for p_chunk, g_chunk, s, model_chunk in chunks((param, grad, square_sum, model_param)):
        p = p_chunk.to(square_sum.dtype)
        g = in_dtype(g_chunk, square_sum.dtype, maximize, grad_scale)
        if weight_decay and not decoupled:
            g = g.add(p, alpha=weight_decay)
        s.addcmul_(g, g)
        denom = s.sqrt().add_(eps)
        if weight_decay and decoupled:
            p.mul_(1 - lr * weight_decay)
        subtract_quotient_(p, g, denom, lr)
        write_back(p_chunk, p, model_chunk)


def norm(x: Tensor) -> Tensor:
    """See ``apex_npu.ops.segmented.norm``."""
    if x.device.type != "cpu":
        total: Tensor = torch.linalg.vector_norm(x, dtype=wide_dtype(x.dtype))
        return total
    # Each row in float32, all of them in float64; unless squares leave float32's range, or elements are not finite.
    total = _sum_of_squares(x, wide_dtype(x.dtype))
    if not 1e-30 < total < math.inf:
        total = _sum_of_squares(x, torch.float64)
    return total.sqrt_().to(wide_dtype(x.dtype))


def checked_norm(x: Tensor, found_inf: Tensor) -> Tensor:
    """See ``apex_npu.ops.segmented.norm``."""
    # The largest magnitude is finite where all are, whatever becomes of their squares; and no host is asked.
    if x.numel():
        found_inf.masked_fill_(torch.linalg.vector_norm(x, math.inf).isfinite().logical_not_(), 1.0)
    total: Tensor = torch.ops.apex_npu.norm.default(x)
    return total


def _sum_of_squares(x: Tensor, dtype: torch.dtype) -> Tensor:
    # What has the dtype need not be cut into chunks, since nothing but the norms of rows is written.
    wide = [x] if x.dtype == dtype else (chunk.to(dtype) for (chunk,) in chunks((x,)))
    norms = []
    for part in wide:
        even = part.numel() // _ROW_NUMEL * _ROW_NUMEL
        norms += [torch.linalg.vector_norm(part[:even].view(-1, _ROW_NUMEL), dim=1), part[even:].norm().view(1)]
    return torch.cat(norms or [x]).double().square_().sum()
