# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's own fused kernels on flat buffers: one call makes one pass over memory.

On a single flat tensor, torch's CPU kernels come close to the memory's speed; on a list of small tensors they do not.
The kernels take operands of one dtype; for others, the functions here call the reference. The kernels would divide
scaled gradients in place, and no op may write a gradient, so chunks of the gradients are divided into other memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_npu.backends._torch_private import labelled
from apex_npu.ops import elementwise, reference
from apex_npu.ops.dispatch import Call

# Larger than elsewhere: a call of these kernels costs more, and a chunk needs less room in the cache.
_CHUNK_NUMEL = 1 << 18
# At this step, betas to the power of the step are negligible, so that torch's bias correction changes nothing.
LATE_STEP = 2.0**24


def sgd_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> None:
    """Step ``elementwise.sgd_`` by torch's fused kernel if it takes the operands, else by the reference."""
    operands, step = (param, grad, momentum_buffer), options["step"]
    decays = options.get("decoupled", False) and options["weight_decay"] != 0
    # The buffer holds zeros before the first step, so dampening is the only difference of that step.
    dampened = momentum_buffer is not None and options["dampening"] != 0
    # torch does not combine dampening with Nesterov's momentum.
    asks = dampened and (isinstance(step, Tensor) or options["nesterov"])
    # torch has no buffer without momentum.
    asks = asks or (momentum_buffer is not None and options["momentum"] == 0)
    if decays or asks or not _one_dtype(grad, param, momentum_buffer) or param.dtype in reference.LOW_PRECISION:
        elementwise.sgd_.reference(*operands, grad_scale=grad_scale, found_inf=found_inf, **options)
        return
    del options["step"]
    options.pop("decoupled", None)
    if momentum_buffer is None:
        options |= {"momentum": 0.0, "nesterov": False}  # torch would look for the buffer
    options["lr"], found_inf = _as_torch_reads(options["lr"]), _as_torch_reads(found_inf, flag=True)
    first = not isinstance(step, Tensor) and step == 1
    for p, g, b in _pieces(operands, grad_scale):
        buffers = [] if b is None else [b]
        torch._fused_sgd_([p], [g], buffers, is_first_step=first, found_inf=found_inf, **options)


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> None:
    """Step ``elementwise.adam_`` by torch's fused kernel if it takes the operands, else by the reference."""
    operands = (param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq)
    # torch has no option to leave out the bias correction, but at a very late step there is nothing to correct.
    corrects = options.get("bias_correction", True)
    steps = options["step"] if corrects else late_step(options["beta1"], options["beta2"])
    if steps is None or not _one_dtype(grad, param, *operands[2:]):
        elementwise.adam_.reference(*operands, grad_scale=grad_scale, found_inf=found_inf, **options)
        return
    kernel = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    del options["step"]
    options.pop("bias_correction", None)
    options["lr"], found_inf = _as_torch_reads(options["lr"]), _as_torch_reads(found_inf, flag=True)
    if not isinstance(steps, Tensor):
        steps = torch.full((), float(steps), dtype=torch.float32, device=param.device)
    for p, g, m, v, v_max in _pieces(operands, grad_scale):
        v_maxes = [] if v_max is None else [v_max]
        kernel([p], [g], [m], [v], v_maxes, [steps], amsgrad=v_max is not None, found_inf=found_inf, **options)


def joined(calls: Sequence[Call]) -> list[tuple[int, Call]]:
    """Join neighbours among ``calls`` that torch's kernels step in one call.

    Returns:
        The calls, each with the number of ``calls`` that it replaces.
    """
    found: list[tuple[int, Call]] = []
    for (step, _, options), group in itertools.groupby(calls, _shared):
        members = list(group)
        if step is None:
            found += [(1, call) for call in members]
        else:
            columns = zip(*(operands for _, operands, _ in members), strict=True)
            lists = tuple([] if column[0] is None else list(column) for column in columns)
            found.append((len(members), (step, lists, options)))
    return found


def _shared(call: Call) -> tuple[Callable[..., None] | None, Any, Any]:
    """Return the function that steps lists of operands like those of ``call``, or None, their dtypes, and its options.

    Calls for which these are equal can be joined.
    """
    kernel, operands, given = call
    options = {name: value for name, value in given.items() if value is not None}
    step: Callable[..., None] | None = None
    if kernel is elementwise.sgd_.kernels.get("cpu"):
        plain = not options.pop("decoupled", False) and not options["dampening"]
        step = _step_sgd_lists if plain else None
    elif kernel is elementwise.adam_.kernels.get("cpu"):
        step = _step_adam_lists if options.pop("bias_correction", True) else None
    dtypes = [None if operand is None else operand.dtype for operand in operands] if step else []
    fits = bool(dtypes) and dtypes[0] == dtypes[1] and dtypes[0] not in reference.LOW_PRECISION
    on_host = all(isinstance(value, (float, int)) for value in options.values())  # neither scales nor encodings
    return (step, dtypes, options) if fits and on_host else (None, None, None)


@labelled("apex_npu::sgd_")
def _step_sgd_lists(params: list[Tensor], *others: list[Tensor], step: int, **options: Any) -> None:
    torch._fused_sgd_(params, *others, is_first_step=step == 1, **options)


@labelled("apex_npu::adam_")
def _step_adam_lists(params: list[Tensor], *others: list[Tensor], step: int, decoupled: bool, **options: Any) -> None:
    kernel: Callable[..., None] = torch._fused_adamw_ if decoupled else torch._fused_adam_
    steps = [torch.full((), float(step), dtype=torch.float32, device=params[0].device)] * len(params)
    kernel(params, *others, steps, amsgrad=bool(others[-1]), **options)


def _as_torch_reads(number: Any, *, flag: bool = False) -> Any:
    """Convert a tensor to float32, and a flag to 0 or 1, as torch's kernels require; return other numbers unchanged."""
    if not isinstance(number, Tensor):
        return number
    return (number != 0 if flag else number).to(torch.float32)


def _one_dtype(grad: Tensor, param: Tensor, *states: Tensor | None) -> bool:
    """Return whether the states have the dtype of the parameters and the gradient can be converted to it."""
    alike = all(state.dtype == param.dtype for state in states if state is not None)
    return alike and reference.is_wide_or_narrow(grad, param)


def late_step(*betas: float) -> float | None:
    """Return ``LATE_STEP``; None if one of ``betas`` to that power is not negligible."""
    return LATE_STEP if max(betas) ** LATE_STEP < 1e-30 else None


def _pieces(tensors: tuple[Tensor | None, ...], grad_scale: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield the operands, with the gradient divided by ``grad_scale`` and in the parameters' dtype.

    The operands are whole if the gradient is ready as it is, and in pieces otherwise.
    """
    param, grad = tensors[:2]
    assert param is not None
    assert grad is not None
    if grad_scale is None and grad.dtype == param.dtype:
        yield tensors
        return
    step = max(_CHUNK_NUMEL, reference.chunk_numel(grad.device))
    inverse = None if grad_scale is None else grad_scale.to(param.dtype).reshape(1).reciprocal()
    ready = param.new_empty(min(step, grad.numel()))
    for piece, given, *others in reference.chunks(tensors, step):
        wide = ready[: given.numel()]
        yield piece, wide.copy_(given) if inverse is None else torch.mul(given, inverse, out=wide), *others
