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
    """Return the kernel of ``rule``, which reads tensors for numbers; call it only if ``available``."""
    function, plain = getattr(extension, rule.name), extension.Encoding()
    defaults = {name: rule.defaults.get(name) for name in rule.options}

    def step(*operands: Any, found_inf: Tensor | None = None, encoding: Any = None, **options: Any) -> None:
        if found_inf is not None and bool(found_inf):
            return
        in_cpp = plain if encoding is None else encoding.in_cpp(rule.states, operands[2:])
        function(in_cpp, *operands, *{**defaults, **options}.values())

    return step


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
