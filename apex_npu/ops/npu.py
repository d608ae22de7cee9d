# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fused kernels of Ascend's CANN, for releases of torch_npu that have them; they take far fewer launches.

Adam has two kernels, both in https://gitee.com/ascend/op-plugin. ``npu_apply_adam_w`` takes one launch for tensors that
cover their whole storages, and copies other tensors. ``aten::_fused_adamw_`` takes two launches, and supports views and
AMSGrad. Both compute AdamW's rule, which equals Adam's without decay. ``aten::_fused_adam_`` is not used: it is
registered for every chip, but computes on the CPU on most of them.

CANN's kernels compute 1 − beta in float32, from a float32 beta. For 0.999 the result is 1.3e-5 too small, for 0.9999
1.7e-4 too large, and the first steps' ``exp_avg_sq`` is off by as much. An extra launch therefore adds the difference
to the moment before the kernel runs. It moves 16 bytes for each element; the kernel moves 28 and the reference 76.
Moments and steps are then within float32's rounding of the exact rule, as the reference's are, so that a checkpoint
means the same here and in torch.optim. Differences of less than four units in the last place (beta 0.9 and 0.95) are
ignored.

LAMB's direction is a step of Adam's kernel from zero. Its norms are taken over rows of 16 elements. Every slot begins
at a multiple of 16, so the trust ratio is looked up once for each row, not once for each element.

A kernel is used only if a trial step of a small tensor agrees with the reference; each process tries it once for each
device. Otherwise the reference kernel is used, with a warning in the log.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from apex_npu.backends._torch_private import has_kernel
from apex_npu.ops import aten_fused, elementwise, reference, segmented
from apex_npu.ops.dispatch import Rule

logger = logging.getLogger("apex_npu")

# torch_npu's number of the 910B1. Chips of earlier generations have no optimizer kernels of aten::.
_OLDEST_CHIP = 220
_TRIAL_NUMEL = 64
# These kernels do not take 16-bit gradients; at most this many elements are widened at once.
_WIDENED_NUMEL = 1 << 24
# Slots of flat buffers begin at multiples of this, and end there with the padding.
_ROW_NUMEL = 16


def has_apply_adam_w() -> bool:
    """Return whether torch_npu has its AdamW kernel: the overload that writes to a list of tensors."""
    overload = getattr(getattr(torch.ops.npu, "npu_apply_adam_w", None), "out", None)
    return overload is not None and overload._schema.arguments[-1].name == "out"


def has_aten_kernel(name: str) -> bool:
    """Return whether torch_npu has a kernel for ``aten::name``, an optimizer of torch, and the chip supports it."""
    if not has_kernel(f"aten::{name}", "PrivateUse1"):
        return False
    import torch_npu

    return int(torch_npu.npu.utils.get_soc_version()) >= _OLDEST_CHIP


@functools.cache
def works(kernel: str, device: torch.device) -> bool:
    """Return whether ``kernel`` exists and its trial step on ``device`` agrees with the reference on the host.

    The first call waits for the device.
    """
    has_kernel, trial, expected = _KERNELS[kernel]
    if not has_kernel():
        logger.info("apex_npu: %s is not available for %s, falling back to plain torch (more launches)", kernel, device)
        return False
    tried, right = (
        [torch.full((_TRIAL_NUMEL,), 0.5 + 0.1 * i, dtype=torch.float32, device=there) for i in range(4)]
        for there in (device, torch.device("cpu"))
    )
    try:
        trial(*tried)
        found = torch.stack(tried).cpu()
    except RuntimeError as error:
        because = str(error)
    else:
        expected(*right)
        if torch.allclose(found, torch.stack(right), rtol=1e-4, atol=1e-6):
            return True
        because = f"its trial step gave {found[:, 0].tolist()} instead of {torch.stack(right)[:, 0].tolist()}"
    logger.warning("apex_npu: %s on %s: falling back to plain torch (more launches): %s", kernel, device, because)
    return False


def kernel(rule: Rule[...], by_cann: Callable[..., None]) -> Callable[..., None]:
    """Return the kernel of ``rule``: ``by_cann`` if the host knows all numbers, else the reference."""

    def step(*operands: Any, found_inf: Tensor | None = None, **options: Any) -> None:
        if found_inf is None and not any(isinstance(options.get(name), Tensor) for name in rule.numbers):
            by_cann(*operands, **options)
        else:
            rule.reference(*operands, found_inf=found_inf, **options)

    return rule.decoding(step)


def sgd_(param: Tensor, grad: Tensor, momentum_buffer: Tensor | None, *args: Any, **options: Any) -> None:
    """Step ``elementwise.sgd_`` by CANN's kernel if it takes the operands, else by the reference."""
    # CANN's kernel requires momentum.
    fused = momentum_buffer is not None and options["momentum"] > 0 and _is_float32(param, momentum_buffer)
    fused = fused and reference.is_wide_or_narrow(grad, param)
    kernel = aten_fused.sgd_ if fused and works("_fused_sgd_", param.device) else elementwise.sgd_.reference
    kernel(param, grad, momentum_buffer, *args, **options)


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    **options: Any,
) -> None:
    """Step ``elementwise.adam_`` by one of CANN's kernels if it takes the operands, else by the reference."""
    operands = (param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq)
    pieces = list(reference.chunks(operands, _piece_numel(param, grad, options)))
    kernel = _adam_kernel(*pieces[0], betas=(options["beta1"], options["beta2"])) if pieces else None
    if kernel is None:
        elementwise.adam_.reference(*operands, **options)
        return
    for piece in pieces:
        _adam(kernel, *piece, **options)


def _piece_numel(param: Tensor, grad: Tensor, options: dict[str, Any]) -> int | None:
    """Return the number of elements to step at once; None for a default that bounds the memory of a new gradient."""
    if grad.dtype != param.dtype:
        return _WIDENED_NUMEL
    decays = options.get("weight_decay", 0) != 0 and not options["decoupled"]
    return None if decays or options.get("grad_scale") is not None else param.numel()


class _Rows(NamedTuple):
    """The positions of segments in a buffer that is viewed as rows.

    Attributes:
        ids: The index of the segment of each row; see ``reference.segment_ids``.
        padding: The elements that share a row with the end of a segment but belong to no segment.
    """

    ids: Tensor
    padding: Tensor


_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# The options of LAMB that its direction depends on, by Adam's names for them.
_OF_DIRECTION = ("beta1", "beta2", "eps", "step", "maximize", "bias_correction", "grad_scale")


def _rows_of(starts: Tensor, lengths: Tensor, buffer: Tensor) -> _Rows | None:
    """Return the rows of ``buffer``, found once for each segments; None if a row may have parts of two segments."""
    if buffer.numel() % _ROW_NUMEL or bool((starts % _ROW_NUMEL).any()):
        return None
    found: _Rows | None = _rows.get(starts)
    if found is None:
        counts = (lengths + _ROW_NUMEL - 1) // _ROW_NUMEL
        numel = buffer.numel() // _ROW_NUMEL
        ids = reference.segment_ids(starts // _ROW_NUMEL, counts, numel, buffer.device)
        ends, free = starts + lengths, counts * _ROW_NUMEL - lengths
        before = torch.repeat_interleave(free.cumsum(0) - free, free)
        padding = torch.repeat_interleave(ends, free) + torch.arange(before.numel(), device=before.device) - before
        found = _rows[starts] = _Rows(ids, padding.to(buffer.device))
    return found


def lamb_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    direction: Tensor,
    starts: Tensor,
    lengths: Tensor,
    ids: Tensor | None,
    **options: Any,
) -> None:
    """Step ``segmented.lamb_`` by a kernel of Adam if it takes the operands, else by the reference."""
    options = {**segmented.lamb_.defaults, **options}
    del options["found_inf"], options["encoding"]
    betas = options["beta1"], options["beta2"]
    is_adams = options["adapt"] and not options["l2"] and options["beta3"] == 1 - betas[0]
    rows = _rows_of(starts, lengths, param) if is_adams and _is_float32(param) else None
    operands_of_adam = (direction, grad, exp_avg, exp_avg_sq, None)
    pieces = list(reference.chunks(operands_of_adam, _piece_numel(param, grad, options)))
    kernel = _adam_kernel(*pieces[0], betas=betas) if rows is not None and pieces else None
    if rows is None or kernel is None:
        operands = (param, grad, exp_avg, exp_avg_sq, direction, starts, lengths, ids)
        segmented.lamb_.reference(*operands, **options)
        return
    if options["decay"]:
        torch.mul(param, -options["decay"], out=direction)
    else:
        direction.zero_()
    settings = {name: options[name] for name in _OF_DIRECTION if name in options}
    for piece in pieces:
        _adam(kernel, *piece, lr=1.0, weight_decay=0.0, decoupled=True, **settings)
    # ``direction`` now holds the direction with the opposite sign.
    squares = _squared_norms(param, direction, rows, starts.numel())
    ratio = reference.trust_ratio(squares, options["max_weight_norm"])
    factors = ratio[rows.ids[: param.numel() // _ROW_NUMEL]].unsqueeze(1)
    param.view(-1, _ROW_NUMEL).addcmul_(direction.view(-1, _ROW_NUMEL), factors, value=options["lr"])


def _squared_norms(param: Tensor, direction: Tensor, rows: _Rows, count: int) -> Tensor:
    """Return squared norms for each of ``count`` segments and for the padding; padding inside rows becomes zero."""
    numel = param.numel() // _ROW_NUMEL
    squares = param.new_empty(2, rows.ids.numel())
    for x, norms in zip((param, direction), squares, strict=True):
        if rows.padding.numel():
            # It is zero already, unless a step has overflowed or the user has written to the whole buffer.
            x.index_fill_(0, rows.padding, 0.0)
        torch.linalg.vector_norm(x.view(-1, _ROW_NUMEL), dim=1, out=norms[:numel])
    squares.square_()
    lanes = reference.lanes_of(numel, count, param.device)
    partial = squares.new_zeros(2, count + 2, lanes)
    partial.scatter_add_(1, rows.ids.view(1, -1, lanes).expand(2, -1, -1), squares.view(2, -1, lanes))
    return partial.sum(2)[:, :-1]


def _adam_kernel(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    *,
    betas: tuple[float, float],
) -> Callable[..., None] | None:
    """Return the kernel for these operands; None if only the reference takes them."""
    if not _is_float32(param, exp_avg) or not reference.is_wide_or_narrow(grad, param):
        return None
    stepped_by = (grad,) if grad.dtype == param.dtype else ()  # else a copy, which covers its storage
    whole = max_exp_avg_sq is None and all(map(_is_whole, (param, *stepped_by, exp_avg, exp_avg_sq)))
    if whole and works("npu_apply_adam_w", param.device):
        return _apply_adam_w
    has_late_step = aten_fused.late_step(*map(_as_float32, betas)) is not None
    return _fused_adamw if has_late_step and works("_fused_adamw_", param.device) else None


def _is_float32(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.float32 for t in tensors)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _as_float32(number: float) -> float:
    return ctypes.c_float(number).value


def _shortfall(beta: float) -> float:
    """Return the error of the kernel's 1 − beta; 0 if it is less than four units in the last place."""
    short = _as_float32(beta) - beta
    return short if abs(short) > 2.0**-21 * (1 - beta) else 0.0


def _adam(
    kernel: Callable[..., None],
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
    bias_correction: bool = True,
    grad_scale: Tensor | None = None,
) -> None:
    l2 = 0.0 if decoupled else weight_decay
    grad = reference.in_dtype(grad, param.dtype, maximize and bool(l2), grad_scale)
    if l2:
        grad = grad.add(param, alpha=l2)
    flips = maximize and not l2
    short1, short2 = _shortfall(beta1), _shortfall(beta2)
    float_beta1, float_beta2 = _as_float32(beta1), _as_float32(beta2)

    def add_shortfall(times: float) -> None:
        # Divide by the factor that the kernel is about to apply.
        if short1:
            exp_avg.add_(grad, alpha=(-times if flips else times) * short1 / float_beta1)
        if short2:
            exp_avg_sq.addcmul_(grad, grad, value=times * short2 / float_beta2)

    # The kernel would compute 1 − beta2^step in float32, with only five digits for the first steps. It therefore runs
    # without bias correction, with a learning rate and an eps that have the same effect. They are computed from the
    # betas that the moments were made with.
    bias1, bias2 = 1 - (beta1 if short1 else float_beta1) ** step, 1 - (beta2 if short2 else float_beta2) ** step
    if not bias_correction:
        bias1, bias2 = bias1 / (1 - beta1**step), bias2 / (1 - beta2**step)
    root2 = bias2**0.5
    add_shortfall(1.0)
    try:
        kernel(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            max_exp_avg_sq,
            lr=lr * root2 / bias1,
            beta1=float_beta1,
            beta2=float_beta2,
            eps=eps * root2,
            weight_decay=weight_decay * bias1 / root2 if decoupled else 0.0,
            maximize=flips,
        )
    except RuntimeError:
        add_shortfall(-1.0)  # the next try adds it again
        raise


# AdamW without bias correction by each kernel: powers of 0, or a step so late that there is nothing to correct.


def _apply_adam_w(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    _: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> None:
    outputs = [param, exp_avg, exp_avg_sq]
    numbers = (0.0, 0.0, lr, weight_decay, beta1, beta2, eps)
    torch.ops.npu.npu_apply_adam_w.out(*numbers, grad, None, False, maximize, out=outputs)


def _fused_adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    maximize: bool = False,
    **options: Any,
) -> None:
    torch._fused_adamw_(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [] if max_exp_avg_sq is None else [max_exp_avg_sq],
        [_late_step(param.device)],
        amsgrad=max_exp_avg_sq is not None,
        maximize=maximize,
        **options,
    )


@functools.cache
def _late_step(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), aten_fused.LATE_STEP, dtype=torch.float32, device=device)


_ADAM: dict[str, Any] = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 0.25, "weight_decay": 0.5}
_SGD: dict[str, Any] = {
    "lr": 0.5,
    "momentum": 0.5,
    "weight_decay": 0.5,
    "maximize": False,
    "step": 2,
}


def _step_sgd(kernel: Callable[..., None], *operands: Tensor) -> None:
    """Make a step with dampening, and one with Nesterov's momentum, which torch's kernel does not combine with it."""
    kernel(*operands[:3], dampening=0.25, nesterov=False, **_SGD)
    kernel(*operands[:3], dampening=0.0, nesterov=True, **_SGD)


def _reference_adamw(*operands: Tensor) -> None:
    elementwise.adam_.reference(*operands, None, **_ADAM, decoupled=True, maximize=False, step=1, bias_correction=False)


# For each kernel: whether it exists, a trial step on four tensors of one dtype, and the same step by the reference.
_KERNELS: dict[str, tuple[Callable[[], bool], Callable[..., None], Callable[..., None]]] = {
    "npu_apply_adam_w": (has_apply_adam_w, functools.partial(_apply_adam_w, **_ADAM), _reference_adamw),
    "_fused_adamw_": (
        lambda: has_aten_kernel("_fused_adamw_"),
        functools.partial(_fused_adamw, **_ADAM),
        _reference_adamw,
    ),
    "_fused_sgd_": (
        lambda: has_aten_kernel("_fused_sgd_"),
        lambda *operands: _step_sgd(aten_fused.sgd_, *operands),
        lambda *operands: _step_sgd(elementwise.sgd_.reference, *operands),
    ),
}
# The names that ``works`` accepts.
KERNELS = tuple(_KERNELS)
