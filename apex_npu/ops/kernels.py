# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of kernels: for each op, those of the devices that have one. Elsewhere the body of its declaration runs.

Those of the CPU are in the C++ extension (csrc/fused_optim), if it is loaded, and else torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from apex_npu._extension import extension
from apex_npu.ops import aten_fused, cuda, npu
from apex_npu.ops.dispatch import Op, Rule
from apex_npu.ops.elementwise import RULES, adam_, sgd_
from apex_npu.ops.segmented import lamb_, look, norm, norm_to_clip, segment_add_, segment_dot


def _reading_numbers(rule: Rule[...], kernel: Callable[..., None]) -> Callable[..., None]:
    """Return ``kernel`` of ``rule`` for the CPU, with tensors for numbers read first, because it is exacter without."""

    def step(*operands: Any, **options: Any) -> None:
        for name in rule.numbers & options.keys():
            options[name] = rule.scalars[name](options[name])
        kernel(*operands, **options)

    return step


def _norm(x: Tensor, found_inf: Tensor | None = None) -> Tensor:
    """Return what ``segmented.norm`` returns, from the extension."""
    if found_inf is not None:
        look(x, found_inf)
    total: Tensor = extension.norm(x)
    return total


def _of_ranges(op: Op[..., Any]) -> Callable[..., Any]:
    """Return the kernel of ``op``, whose last operand is ``ids``, from the extension.

    The extension finds segments by their ranges. With ``ids``, the reference runs.
    """
    function = getattr(extension, op.name)

    def run(*operands: Any) -> Any:
        return function(*operands[:-1]) if operands[-1] is None else op.reference(*operands)

    return run


for _op in (*RULES, lamb_, segment_dot, segment_add_, norm, norm_to_clip):
    _op.kernels["cuda"] = cuda.Kernel(_op)
sgd_.kernels["cuda"] = cuda.Kernel(sgd_, sgd_.decoding(aten_fused.sgd_))
adam_.kernels["cuda"] = cuda.Kernel(adam_, adam_.decoding(aten_fused.adam_))

if extension is not None:
    for _rule in (*RULES, lamb_):
        _rule.kernels["cpu"] = _rule.by_extension()
    for _sums in (segment_dot, segment_add_):
        _sums.kernels["cpu"] = _of_ranges(_sums)
    norm.kernels["cpu"] = _norm
else:
    for _rule in (*RULES, lamb_):
        _rule.kernels["cpu"] = _reading_numbers(_rule, _rule.reference)
    sgd_.kernels["cpu"] = _reading_numbers(sgd_, sgd_.decoding(aten_fused.sgd_))
    adam_.kernels["cpu"] = _reading_numbers(adam_, adam_.decoding(aten_fused.adam_))

sgd_.kernels["npu"] = npu.kernel(sgd_, npu.sgd_)
adam_.kernels["npu"] = npu.kernel(adam_, npu.adam_)
lamb_.kernels["npu"] = npu.kernel(lamb_, npu.lamb_)
