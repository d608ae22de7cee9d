# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every op in plain torch: the kernel wherever there is no better one, and what the better ones are tested against.

The arithmetic is that of the state's dtype, float32 for low-precision parameters, rounded once on the way back. Buffers
are walked in chunks that stay in the cache, so no temporary grows with the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Large enough to hide Python, small enough that a chunk of every operand stays in a core's cache. An accelerator has no
# such cache but a launch cost, hence larger there.
_CHUNK_NUMEL = 1 << 16
_CHUNK_NUMEL_ACCELERATOR = 1 << 26


def _chunks(tensors: tuple[Tensor | None, ...]) -> Iterator[tuple[Tensor | None, ...]]:
    first = tensors[0]
    assert first is not None
    chunk_numel = _CHUNK_NUMEL if first.device.type == "cpu" else _CHUNK_NUMEL_ACCELERATOR
    for begin in range(0, first.numel(), chunk_numel):
        end = min(begin + chunk_numel, first.numel())
        yield tuple(None if t is None else t[begin:end] for t in tensors)


def _in_dtype(grad: Tensor, dtype: torch.dtype, maximize: bool) -> Tensor:
    grad = grad.to(dtype)
    return grad.neg() if maximize else grad


def _write_back(param: Tensor, value: Tensor) -> None:
    if value is not param:
        param.copy_(value)


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
    """See ``apex_npu.ops.schemas.sgd_``."""
    compute_dtype = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
    for p_chunk, g_chunk, b in _chunks((param, grad, momentum_buffer)):
        assert p_chunk is not None
        assert g_chunk is not None
        p = p_chunk.to(compute_dtype)
        update = _in_dtype(g_chunk, compute_dtype, maximize)
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
) -> None:
    """See ``apex_npu.ops.schemas.adam_``."""
    step_size = lr / (1 - beta1**step)
    bias_correction2_sqrt = (1 - beta2**step) ** 0.5
    for p_chunk, g_chunk, m, v, v_max in _chunks((param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq)):
        assert p_chunk is not None
        assert g_chunk is not None
        assert m is not None
        assert v is not None
        p = p_chunk.to(exp_avg.dtype)
        g = _in_dtype(g_chunk, exp_avg.dtype, maximize)
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
