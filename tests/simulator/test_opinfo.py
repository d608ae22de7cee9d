# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every operator that torch has sample inputs for: values and gradients on npu are the CPU's."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
import unittest
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

if importlib.util.find_spec("expecttest") is None:
    # torch's test utilities import it for a class that nothing here uses.
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stub

from torch.testing._internal.common_methods_invocations import op_db

SAMPLES = 3
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_UNINITIALISED = "its values are what the memory held before"
_LEFT_OUT = {
    **dict.fromkeys(
        ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"], _UNINITIALISED
    ),
    "as_strided.partial_views": "its samples are views that a copy to another device is none of",
    "tensor_split": "torch wants the sections that it is given as a tensor on the CPU",
}
# Composites that take one way on the CPU and another on all other devices, one rounding apart.
_ROUNDED_ELSEWHERE = {"nn.functional.linear_cross_entropy", "nn.functional.scaled_dot_product_attention"}


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS = [op for op in op_db if not op.name.startswith("jiterator") and name_of(op) not in _LEFT_OUT]


def moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or value == "cpu":
        return device
    return value


def run(op: Any, sample: Any, device: str) -> tuple[list[Any], list[Tensor | None]]:
    """What the operator returns, and the gradients of the sum of that."""
    torch.manual_seed(1)
    args, kwargs = tree_map(lambda value: moved(value, device), ((sample.input, *sample.args), sample.kwargs))
    outputs = tree_flatten(op(*args, **kwargs))[0]
    tensors = [x for x in outputs if isinstance(x, Tensor)]
    assert all(x.device.type == device for x in tensors), [x.device for x in tensors]
    leaves = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]
    roots = [(x.abs() if x.is_complex() else x).sum() for x in tensors if x.requires_grad]
    grads = torch.autograd.grad(roots, leaves, allow_unused=True) if roots and leaves else []
    return tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, (outputs, list(grads)))


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_matches_cpu(op: Any) -> None:
    for dtype in DTYPES:
        if op.supports_dtype(dtype, "cpu"):
            compare(op, dtype)


def compare(op: Any, dtype: torch.dtype) -> None:
    rounded = any(name_of(op).startswith(name) for name in _ROUNDED_ELSEWHERE) and dtype != torch.float32
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if rounded else {"rtol": 1e-4, "atol": 1e-5}
    # The function itself: `op.sample_inputs` looks through the whole stack for a unittest, which takes most of a test.
    samples = op.sample_inputs_func(op, "cpu", dtype, op.supports_autograd)
    for sample in itertools.islice(samples, SAMPLES):
        try:
            want = run(op, sample, "cpu")
        except (NotImplementedError, RuntimeError) as error:
            with pytest.raises(type(error)):
                run(op, sample, "npu")
            continue
        torch.testing.assert_close(run(op, sample, "npu"), want, equal_nan=True, **tolerance)


def test_there_are_enough() -> None:
    assert len({op.name for op in OPS}) >= 150
