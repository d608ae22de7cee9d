# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where Triton's kernels can be run: compiled on a GPU, or on the CPU by Triton's interpreter, which is mended here.

Tests that import this are skipped where there is no Triton.
"""

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
from triton.runtime import interpreter

from apex_npu.ops.triton_kernels import rules

INTERPRETED = isinstance(rules.adam, interpreter.InterpretedFunction)
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("Triton was imported before tests/conftest.py could ask for its interpreter", allow_module_level=True)
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
if ((3, 7) if INTERPRETED else (3, 6)) > VERSION:
    pytest.skip(f"Triton {triton.__version__}: no loops in its interpreter with numpy 2.4", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to bfloat16, where the interpreter cuts off or worse, and leave memory that was not written alone."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def convert(builder, source, target_type, *_):
        kinds = [source.dtype.scalar, target_type.scalar]
        if not all(kind.is_floating() for kind in kinds):
            return cast(builder, source, target_type)
        source_dtype, dtype = (_DTYPES[kind.name] for kind in kinds)
        data = np.ascontiguousarray(source.data)
        data = data.view(np.int16) if data.dtype == np.uint16 else data
        numbers = torch.from_numpy(data).view(source_dtype).to(dtype)
        data = numbers.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else numbers.numpy()
        return interpreter.TensorHandle(data, kinds[1])

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", convert)
    # It copies the memory of tensors back and forth, for devices; here these are the same memory.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
