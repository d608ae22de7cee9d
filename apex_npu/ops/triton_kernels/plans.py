# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""For each op what it launches, or None where its segments are not what kernels can follow, and plain torch can.

Everything that depends on hyper-parameters alone is computed here, in float64; or by a launch of one program, where the
device alone knows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from apex_npu.ops.reference import wide_dtype
from apex_npu.ops.triton_kernels import adamp, lamb, numbers, rules, sums
from apex_npu.ops.triton_kernels.chunks import Chunks, Rows
from apex_npu.ops.triton_kernels.launches import Launch, Plan
from apex_npu.ops.triton_kernels.operands import check_operands

# Elements of a program: eight for each thread, which is two loads of 16 bytes for float32.
_BLOCK, _WARPS = 1024, 4
# Programs of a norm, at most; each of them leaves one number.
_NORM_BLOCK, _NORM_PROGRAMS = 2048, 1024
# Chunks of a segment that are added at once.
_SUM_BLOCK, _SUM_WARPS = 256, 2


@dataclass(frozen=True)
class _Numbers:
    """What depends on a step's learning rate and count: see ``numbers.py``, where these names are.

    Attributes:
        on_device: Where kernels find all that, after ``launches``; None: they are given the other attributes.
    """

    lr: float = 0.0
    step_size: float = 0.0
    correction1: float = 1.0
    root_correction2: float = 1.0
    kept: float = 1.0
    kept_if_projected: float = 1.0
    first: bool = False
    on_device: Tensor | None = None
    launches: tuple[Launch, ...] = ()

    @classmethod
    def of(
        cls,
        param: Tensor,
        lr: float | Tensor,
        step: int | Tensor,
        found_inf: Tensor | None,
        *,
        betas: tuple[float, float] | None = None,
        decay: float = 0.0,
        decay_if_projected: float = 0.0,
    ) -> _Numbers:
        """Without ``betas`` nothing is corrected."""
        if isinstance(lr, Tensor) or isinstance(step, Tensor) or found_inf is not None:
            on_device = param.new_empty(numbers.COUNT, dtype=torch.float64)
            lr_tensor, rate = (_beside(lr, param), 0.0) if isinstance(lr, Tensor) else (None, lr)
            step_tensor, count = (_beside(step, param), 0.0) if isinstance(step, Tensor) else (None, float(step))
            logs = [math.log(beta) if beta else -math.inf for beta in betas or (0.0, 0.0)]
            tensors = (on_device, lr_tensor, step_tensor, _beside(found_inf, param))
            args = (*tensors, rate, count, *logs, decay, decay_if_projected)
            launch = Launch(numbers.step_numbers, 1, args, {"CORRECTED": betas is not None}, 1)
            return cls(on_device=on_device, launches=(launch,))
        correction1, correction2 = (1 - beta**step for beta in betas) if betas else (1.0, 1.0)
        return cls(
            lr=lr,
            step_size=lr / correction1,
            correction1=correction1,
            root_correction2=correction2**0.5,
            kept=1 - lr * decay,
            kept_if_projected=1 - lr * decay_if_projected,
            first=step == 1,
        )


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
) -> Plan:
    """See ``apex_npu.ops.elementwise.sgd_``."""
    known = _Numbers.of(param, lr, step, found_inf, decay=weight_decay)
    decay, flags = _decay(weight_decay, decoupled, known.kept)
    flags |= {"NESTEROV": nesterov, "FIRST": known.first, "MAXIMIZE": maximize}
    operands = {"param": param, "grad": grad, "momentum_buffer": momentum_buffer, "model_param": model_param}
    return _elementwise(
        "sgd_", rules.sgd, operands, grad_scale, known, (known.lr, momentum, 1 - dampening, decay), flags
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
) -> Plan:
    """See ``apex_npu.ops.elementwise.adam_``."""
    betas = (beta1, beta2) if bias_correction else None
    known = _Numbers.of(param, lr, step, found_inf, betas=betas, decay=weight_decay)
    decay, flags = _decay(weight_decay, decoupled, known.kept)
    operands = {
        "param": param,
        "grad": grad,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "max_exp_avg_sq": max_exp_avg_sq,
        "model_param": model_param,
    }
    arguments = (known.step_size, 1 - beta1, beta2, 1 - beta2, eps, decay, known.root_correction2)
    return _elementwise("adam_", rules.adam, operands, grad_scale, known, arguments, flags | {"MAXIMIZE": maximize})


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
    found_inf: Tensor | None = None,
) -> Plan:
    """See ``apex_npu.ops.elementwise.rmsprop_``."""
    known = _Numbers.of(param, lr, 0, found_inf)
    decay, flags = _decay(weight_decay, decoupled, 1 - weight_decay)
    flags |= {"EPS_INSIDE_SQRT": eps_inside_sqrt, "LR_IN_MOMENTUM": lr_in_momentum, "MAXIMIZE": maximize}
    operands = {
        "param": param,
        "grad": grad,
        "square_avg": square_avg,
        "grad_avg": grad_avg,
        "momentum_buffer": momentum_buffer,
        "model_param": model_param,
    }
    arguments = (known.lr, alpha, 1 - alpha, eps, decay, momentum)
    return _elementwise("rmsprop_", rules.rmsprop, operands, grad_scale, known, arguments, flags)


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
    found_inf: Tensor | None = None,
) -> Plan:
    """See ``apex_npu.ops.elementwise.adadelta_``."""
    known = _Numbers.of(param, lr, 0, found_inf)
    flags = {"L2": weight_decay != 0, "MAXIMIZE": maximize}
    operands = {
        "param": param,
        "grad": grad,
        "square_avg": square_avg,
        "acc_delta": acc_delta,
        "model_param": model_param,
    }
    arguments = (known.lr, rho, 1 - rho, eps, weight_decay)
    return _elementwise("adadelta_", rules.adadelta, operands, grad_scale, known, arguments, flags)


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
    found_inf: Tensor | None = None,
) -> Plan:
    """See ``apex_npu.ops.elementwise.adagrad_``."""
    known = _Numbers.of(param, lr, 0, found_inf, decay=weight_decay)
    decay, flags = _decay(weight_decay, decoupled, known.kept)
    flags |= {"MAXIMIZE": maximize}
    operands = {"param": param, "grad": grad, "square_sum": square_sum, "model_param": model_param}
    return _elementwise("adagrad_", rules.adagrad, operands, grad_scale, known, (known.lr, eps, decay), flags)


def norm(x: Tensor) -> Plan:
    """See ``apex_npu.ops.segmented.norm``."""
    return _norm(x, None)


def checked_norm(x: Tensor, found_inf: Tensor) -> Plan | None:
    """See ``apex_npu.ops.segmented.norm``."""
    return None if x.dtype == torch.float64 else _norm(x, found_inf)  # whose squares may overflow


def _norm(x: Tensor, found_inf: Tensor | None) -> Plan:
    check_operands("norm", x=x)
    programs = min(_NORM_PROGRAMS, max(1, -(-x.numel() // _NORM_BLOCK)))
    parts = x.new_empty(programs, dtype=torch.float64)
    result = x.new_empty((), dtype=wide_dtype(x.dtype))
    first = Launch(sums.square_parts, programs, (x, parts, x.numel(), programs), {"BLOCK": _NORM_BLOCK}, 8)
    last = Launch(sums.root_of_parts, 1, (parts, result, found_inf, programs), {"BLOCK": _NORM_PROGRAMS}, 4)
    return Plan((first, last), result)


def segment_dot(a: Tensor, b: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None) -> Plan | None:
    """See ``apex_npu.ops.segmented.segment_dot``."""
    if ids is not None:
        return None
    check_operands("segment_dot", a=a, b=b)
    chunks = Chunks.of(starts, lengths, a)
    parts = a.new_empty(chunks.begins.numel(), dtype=torch.float64)
    result = a.new_empty(starts.numel())
    first = _over_chunks(sums.dot_parts, chunks, (a, b, parts, chunks.begins, chunks.ends), {})
    return Plan((first, _over_segments(sums.segment_sums, result.numel(), (parts, result, chunks.firsts), {})), result)


def segment_add_(
    x: Tensor, y: Tensor, factors: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None
) -> Plan | None:
    """See ``apex_npu.ops.segmented.segment_add_``."""
    if ids is not None:
        return None
    check_operands("segment_add_", x=x, y=y)
    chunks = Chunks.of(starts, lengths, x)
    args = (x, y, factors, chunks.begins, chunks.ends, chunks.owners)
    return Plan((_over_chunks(sums.segment_add, chunks, args, {"DTYPE": _dtype(x)}),))


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
    found_inf: Tensor | None = None,
) -> Plan | None:
    """See ``apex_npu.ops.segmented.lamb_``."""
    operands = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "model_param": model_param}
    if ids is not None:
        return None
    check_operands("lamb_", **operands, direction=direction)
    chunks = Chunks.of(starts, lengths, param)
    count, dtype = chunks.begins.numel(), {"DTYPE": _dtype(param)}
    parts = param.new_empty(2 * count, dtype=torch.float64)
    flags = {"ADAPT": adapt, "AVERAGE": beta3 == 1 - beta1, "L2": l2 != 0, "DECAY": decay != 0, "MAXIMIZE": maximize}
    known = _Numbers.of(param, lr, step, found_inf, betas=(beta1, beta2) if bias_correction else None)
    scale = _beside(grad_scale, param)
    moments = (*operands.values(), scale, known.on_device, direction, parts, chunks.begins, chunks.ends, count)
    arguments = (known.lr, beta1, beta3, beta2, 1 - beta2, eps, known.correction1, known.root_correction2, l2, decay)
    launches = [*known.launches, _over_chunks(lamb.lamb_directions, chunks, (*moments, *arguments), flags | dtype)]
    if adapt:
        ratios = direction.new_empty(starts.numel())
        finish = (parts, ratios, chunks.firsts, count, max_weight_norm)
        where = (chunks.begins, chunks.ends, chunks.owners)
        move = (param, model_param, direction, ratios, known.on_device, *where, known.lr)
        launches.append(_over_segments(lamb.lamb_ratios, ratios.numel(), finish, dtype))
        launches.append(_over_chunks(lamb.lamb_step, chunks, move, dtype))
    return Plan(tuple(launches))


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
    found_inf: Tensor | None = None,
) -> Plan | None:
    """See ``apex_npu.ops.segmented.adamp_``."""
    operands = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "model_param": model_param}
    if ids is not None:
        return None
    check_operands("adamp_", **operands, direction=direction)
    params, row_count = whole_limit.numel() - 1, starts.numel()
    rows = Rows.of(owner, params)
    if rows is None:
        return None
    chunks = Chunks.of(starts, lengths, param)
    count, dtype = chunks.begins.numel(), {"DTYPE": _dtype(param)}
    parts = param.new_empty(4 * count, dtype=torch.float64)
    row_sums = parts.new_empty(4 * row_count)
    decisions = parts.new_empty(2 * (params + 1))
    where = (chunks.begins, chunks.ends)
    known = _Numbers.of(
        param,
        lr,
        step,
        found_inf,
        betas=(beta1, beta2),
        decay=weight_decay,
        decay_if_projected=weight_decay * wd_ratio,
    )
    scale = _beside(grad_scale, param)
    moments = (param, grad, exp_avg, exp_avg_sq, scale, known.on_device, direction, parts, *where, count)
    arguments = (beta1, 1 - beta1, beta2, 1 - beta2, eps, known.root_correction2)
    decide = (row_sums, rows.firsts, row_limit, whole_limit, decisions, row_count, params, eps)
    finish = (param, model_param, direction, known.on_device, row_sums, decisions, owner, *where, chunks.owners)
    rates = (row_count, params, known.step_size, known.kept, known.kept_if_projected, eps)
    flags = {"NESTEROV": nesterov, "MAXIMIZE": maximize}
    return Plan(
        (
            *known.launches,
            _over_chunks(adamp.adamp_directions, chunks, (*moments, *arguments), flags | dtype),
            _over_segments(adamp.adamp_rows, row_count, (parts, row_sums, chunks.firsts, count, row_count), {}),
            _over_segments(adamp.adamp_decisions, params, decide, {}),
            _over_chunks(adamp.adamp_step, chunks, (*finish, *rates), dtype),
        )
    )


def _decay(weight_decay: float, decoupled: bool, kept: float) -> tuple[float, dict[str, Any]]:
    """What ``load_decayed`` wants: a number, and what it means."""
    decays = weight_decay != 0
    return kept if decoupled else weight_decay, {"L2": decays and not decoupled, "DECOUPLED": decays and decoupled}


def _elementwise(
    op: str,
    kernel: Any,
    operands: dict[str, Tensor | None],
    grad_scale: Tensor | None,
    known: _Numbers,
    arguments: tuple[float, ...],
    flags: dict[str, Any],
) -> Plan:
    check_operands(op, **operands)
    param = operands["param"]
    assert param is not None
    constants = {**flags, "DTYPE": _dtype(param), "BLOCK": _BLOCK}
    args = (*operands.values(), _beside(grad_scale, param), known.on_device, param.numel(), *arguments)
    return Plan((*known.launches, Launch(kernel, -(-param.numel() // _BLOCK), args, constants, _WARPS)))


def _beside(number: Tensor | None, param: Tensor) -> Tensor | None:
    """A kernel can read it only on its own device."""
    return None if number is None else number.to(param.device)


def _over_chunks(kernel: Any, chunks: Chunks, args: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
    warps = max(1, chunks.size // 256)
    return Launch(
        kernel, chunks.begins.numel(), args, {**constants, "ALIGNED": chunks.aligned, "BLOCK": chunks.size}, warps
    )


def _over_segments(kernel: Any, count: int, args: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
    return Launch(kernel, count, args, {**constants, "BLOCK": _SUM_BLOCK}, _SUM_WARPS)


def _dtype(param: Tensor) -> Any:
    return tl.float64 if param.dtype == torch.float64 else tl.float32
