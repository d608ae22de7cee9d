# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""CPU kernels: from the C++ extension (csrc/fused_optim), if it is loaded, else of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from apex_npu._extension import extension
from apex_npu.ops.dispatch import Op, Rule
from apex_npu.ops.segmented import look

available = extension is not None


def rule_kernel(rule: Rule[...]) -> Callable[..., None]:
    """Return the kernel of ``rule``; call it only if ``available``."""
    return rule.by_position(getattr(extension, rule.name), extension.Encoding())


def torch_kernel(rule: Rule[...], kernel: Callable[..., None]) -> Callable[..., None]:
    """Return ``kernel`` of ``rule`` for the CPU, with tensors for numbers read first, because it is exacter without."""

    def step(*operands: Any, **options: Any) -> None:
        for name in rule.numbers & options.keys():
            options[name] = rule.scalars[name](options[name])
        kernel(*operands, **options)

    return step


def norm(x: Tensor, found_inf: Tensor | None = None) -> Tensor:
    """Return what ``segmented.norm`` returns; call it only if ``available``."""
    if found_inf is not None:
        look(x, found_inf)
    total: Tensor = extension.norm(x)
    return total


def segments_kernel(op: Op[..., Any]) -> Callable[..., Any]:
    """Return the kernel of ``op``, whose last operand is ``ids``; call it only if ``available``.

    The extension finds segments by their ranges. With ``ids``, the reference runs.
    """
    function = getattr(extension, op.name)

    def run(*operands: Any) -> Any:
        return function(*operands[:-1]) if operands[-1] is None else op.reference(*operands)

    return run
