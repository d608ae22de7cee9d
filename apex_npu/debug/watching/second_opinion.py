# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs an operator again in float64 on the host, to find out whether its dtype was too small for the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from apex_npu.backends._torch_private import autocast_disabler, tree_map
from apex_npu.debug.text import described
from apex_npu.debug.watching.operators import Arguments, Execution, results_of

# The errors of kernels that are missing, or missing for float64; OutOfMemoryError is a RuntimeError.
_FAILURES = (RuntimeError, NotImplementedError, TypeError, ValueError, MemoryError)


def _matmul_backward(grad: Tensor, a: Tensor, b: Tensor, mask: Sequence[bool]) -> list[Tensor]:
    rows, columns = a[None] if a.dim() == 1 else a, b[:, None] if b.dim() == 1 else b
    grad = grad if b.dim() > 1 else grad[..., None]
    grad = grad if a.dim() > 1 else grad[..., None, :]
    of_rows, of_columns = grad @ columns.mT, rows.mT @ grad
    found = of_rows.sum_to_size(rows.shape).reshape(a.shape), of_columns.sum_to_size(columns.shape).reshape(b.shape)
    return list(compress(found, mask))


def _linear_backward(x: Tensor, grad: Tensor, weight: Tensor, output_mask: Sequence[bool]) -> list[Tensor]:
    grads = grad.reshape(-1, len(weight))
    return list(compress((grad @ weight, grads.T @ x.reshape(-1, x.shape[-1]), grads.sum(0)), output_mask))


def _batch_norm(*args: Any) -> list[Tensor]:
    # The last result is cuDNN's memory for backward.
    return [*torch.native_batch_norm(*args), torch.empty(0, dtype=torch.uint8)]


def _batch_norm_backward(x: Tensor, grad: Tensor, weight: Tensor, *saved: Any) -> list[Tensor]:
    *statistics, eps, _ = saved  # the last one is the memory of forward
    return list(torch.ops.aten.native_batch_norm_backward(grad, x, weight, *statistics, True, eps, [True] * 3))


# Operators that the host has under another name or as several operators; a dispatch mode is below autograd.
_OF_DEVICES: dict[str, Callable[..., list[Tensor]]] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::matmul_backward": _matmul_backward,
    "aten::linear_backward": _linear_backward,
}


@dataclass(frozen=True)
class Opinion:
    """The result of an operator in float64, for results that are not finite.

    Attributes:
        is_finite: Whether all of them are finite in float64.
        largest: The largest magnitude of those that are finite in float64; nan if there is none.
        reason: Why the operator could not be run; empty if it ran.
    """

    is_finite: bool = False
    largest: float = float("nan")
    reason: str = ""


def widen(value: Any) -> Any:
    """Convert an argument for an operator that computes in float64 on the host; tensors are copied.

    Copies are needed because an operator may write more than its schema declares, such as running averages.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", widen(value.dtype), copy=True)
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value
    return torch.device("cpu") if isinstance(value, torch.device) else value


def ask(ran: Execution, *, of_all: bool = False) -> Opinion:
    """Call an operator again in float64; with ``of_all``, all elements of the results count as not finite."""
    try:
        return _compare(call_on_host(ran, ran.before), ran.results(), of_all)
    except _FAILURES as error:
        return Opinion(reason=described(error))


def stays_bad(ran: Execution, mended: set[int]) -> bool | None:
    """Return whether results are bad even if the inputs with the ids ``mended`` are 0; None if it is not known."""

    def placed(value: Any) -> Any:
        return widen(value).nan_to_num(0.0, 0.0, 0.0) if id(value) in mended else value

    try:
        results = call_on_host(ran, tree_map(placed, ran.before))
    except _FAILURES:
        return None
    return not all(bool(t.isfinite().all()) for t in results if t.dtype.is_floating_point)


def copied(value: Any) -> Any:
    """Convert an argument for an operator that computes on the host in the same dtypes; see ``widen``."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def call_on_host(ran: Execution, given: Arguments, convert: Callable[[Any], Any] = widen) -> list[Tensor]:
    """Call the operator of ``ran`` on the host, in float64 or as ``convert`` makes it, with ``given`` copied there."""
    (args, kwargs), operator = given, ran.operator
    named = {n: tree_map(convert, value) for n, value in kwargs.items() if n not in ("generator", "pin_memory")}
    placed = [tree_map(convert, value) for value in args]
    for i, name in enumerate(operator.arguments[: len(placed)]):
        if name == "half_to_float" and convert is widen:  # the result stays float64
            placed[i] = False
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(autocast_disabler()())
        if operator.is_random:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        returned = _OF_DEVICES.get(operator.name, ran.func)(*placed, **named)
    return results_of(operator, returned, (tuple(placed), named))


def _compare(exact: list[Tensor], results: list[Tensor], of_all: bool) -> Opinion:
    if len(exact) != len(results):
        return Opinion(reason="float64 gives another number of results")
    largest, is_finite = float("nan"), True
    for true, result in zip(exact, results, strict=True):
        if not result.dtype.is_floating_point or result.layout != torch.strided or result.is_nested:
            continue
        if true.shape != result.shape:
            return Opinion(reason=f"shape {list(true.shape)} instead of {list(result.shape)} in float64")
        values = true.detach().abs()
        if not of_all:
            values = values[~result.detach().cpu().isfinite()]
        finite = values[values.isfinite()]
        is_finite &= finite.numel() == values.numel()
        if finite.numel():
            high = float(finite.max())
            largest = high if largest != largest else max(largest, high)
    return Opinion(is_finite, largest)
