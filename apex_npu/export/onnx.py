# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""ONNX files of models that amp has trained, written by torch's exporter."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex_npu import amp
from apex_npu.backends._torch_private import tree_leaves, tree_map
from apex_npu.backends.requirements import require
from apex_npu.export.files import first_line, replacing
from apex_npu.export.weights import first, overflows

# The largest difference from the float32 model, relative to the largest magnitude of an output. The relative error of a
# single element has no meaning, since sums cancel. In float32 only the order of sums differs, which is about 1e-6 in
# deep networks; a wrong weight or operator gives far more than 1e-4. In float16 each layer rounds its weights and
# results to 11 bits (5e-4), and the errors of 50 layers add up to less than 1 %.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2}

# The oldest tested releases.
_PACKAGES = {"torch": "2.13", "onnx": "1.20", "onnxscript": "0.6"}
_RUNTIME = {"onnxruntime": "1.23.2"}

_logger = logging.getLogger("apex_npu.export")


class ExportError(RuntimeError):
    """Raised if a model cannot be exported, or its file would give other results; the message says why."""


def to_onnx(
    model: nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: Any = None,
    fold_batch_norm: bool = False,
    allow_rounded: bool = False,
    check: bool = True,
) -> float | None:
    """Write ``model``, in evaluation mode and without amp's casts, to an ONNX file.

    The weights are those of ``model.state_dict()`` (at O2 and O5 the exact float32 values), in ``dtype``. Floating
    inputs and outputs have ``dtype``, too. ``model`` is not changed.

    torch's exporter (``torch.onnx.export(dynamo=True)``) writes the file. Its optimizer folds batch norms into
    convolutions, in ``dtype``. With ``fold_batch_norm`` they are folded before, in float32 by torch.nn.utils.fusion:
    then float16 only rounds the product, and running variances above 65504 do no harm.

    Args:
        model: A model that was trained at any level, or without amp.
        args: Example inputs, with which ``model`` is called. Floating tensors are converted to ``dtype``.
        path: The file to write. It has the old contents or the new ones at any time. Above 2 GB the weights are in a
            second file beside it, ``path`` with ``.data`` appended; one of an earlier export is removed. If ``path`` is
            a link, it stays, and the files are written at its target.
        kwargs: Example inputs that are passed by name.
        dtype: ``torch.float32`` or ``torch.float16``.
        opset: The version of ONNX's operators; None: the version that the exporter recommends.
        input_names: Names of the inputs in the file.
        output_names: Names of the outputs in the file.
        dynamic_shapes: The sizes of the inputs that may vary, as in ``torch.export.export``.
        fold_batch_norm: Fold batch norms in float32. torch.fx must be able to trace ``model``.
        allow_rounded: Accept a model whose weights exist in low precision only, as at O3.
        check: Run the file with onnxruntime on the example inputs, and compare all floating outputs with those of the
            model in float32. The largest difference, relative to the largest magnitude of an output, may be 1e-4 with
            float32 and 2e-2 with float16.

    Returns:
        The largest difference; None without ``check``.

    Raises:
        TypeError: ``model`` is not a module, or ``args`` is not a tuple.
        ValueError: ``dtype`` is neither float32 nor float16.
        RuntimeError: The model's weights exist in low precision only, and ``allow_rounded`` is False.
        ExportError: The file cannot be written; torch cannot export or trace the model; weights are out of float16's
            range; or onnxruntime gives other results, or none. Nothing is written.
        ImportError: A required package is missing or too old.

    Example::

        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> difference = apex_npu.export.to_onnx(model, (input,), "model.onnx")
    """
    kwargs = dict(kwargs or {})
    path = Path(path)
    _check_arguments(model, args, dtype)
    for distribution, oldest in {**_PACKAGES, **(_RUNTIME if check else {})}.items():
        require("to_onnx" if distribution in _PACKAGES else "check=True", distribution, oldest)
    with replacing(path, ExportError) as new, torch.no_grad(), amp.disable_casts():
        clean = amp.float32_copy(model, allow_rounded=allow_rounded).cpu().float().eval()
        inputs = tree_map(lambda value: _to_cpu(value, dtype), (args, kwargs))
        exported = _in_dtype(_folded(clean) if fold_batch_norm else clean, dtype, keep=check)
        program = _export(
            exported,
            inputs[0],
            kwargs=inputs[1],
            opset_version=opset,
            input_names=input_names,
            output_names=output_names,
            dynamic_shapes=dynamic_shapes,
        )
        if opset is not None and (given := program.model.opset_imports.get("")) != opset:
            raise ExportError(
                f"opset={opset}: torch.onnx exports this model with opset {given}; pass that, or leave opset out"
            )
        difference = _difference(program, clean, inputs, dtype) if check else None
        program.save(new)
        has_old_weights = path.exists() and not Path(f"{new}.data").exists()
    if has_old_weights:
        Path(f"{os.path.realpath(path)}.data").unlink(missing_ok=True)
    return difference


def _check_arguments(model: nn.Module, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"to_onnx takes a model, torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(f"to_onnx takes a model, got {type(model).__name__} around one: pass model.module")
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple of inputs, got {type(args).__name__}: for one input, pass (input,)")
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype={dtype}: torch.float32 or torch.float16 is expected")


def _to_cpu(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype)


def _folded(model: nn.Module) -> nn.Module:
    from torch.fx.experimental.optimization import fuse

    try:
        return fuse(model)
    except Exception as error:  # the model's own code runs, with proxies
        raise ExportError(
            f"fold_batch_norm=True: torch.fx cannot trace {type(model).__name__} ({first_line(error)}); leave it out: "
            "torch's exporter folds what it can, in the dtype of the file"
        ) from error


def _in_dtype(model: nn.Module, dtype: torch.dtype, *, keep: bool) -> nn.Module:
    """Return ``model`` in ``dtype``; a copy if ``keep`` is set."""
    if dtype == torch.float32:
        return model
    tensors = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, tensor in tensors if overflows(tensor, dtype)]
    if names:
        raise ExportError(
            f"{len(names)} weights have values that are infinite in float16 ({first(names)}): export float32, or, "
            "if these are running variances, pass fold_batch_norm=True"
        )
    return (copy.deepcopy(model) if keep else model).to(dtype)


def _export(model: nn.Module, args: tuple[Any, ...], **options: Any) -> Any:
    try:
        return torch.onnx.export(model, args, dynamo=True, verbose=False, **options)
    except Exception as error:  # the model's own code runs
        raise ExportError(f"torch.onnx cannot export this {type(model).__name__} ({first_line(error)})") from error


def _difference(program: Any, model: nn.Module, inputs: tuple[Any, Any], dtype: torch.dtype) -> float:
    """Return the largest difference between ``program`` in onnxruntime and ``model``, which is float32."""
    args, kwargs = tree_map(lambda value: _to_cpu(value, torch.float32), inputs)
    expected = [value for value in tree_leaves(model(*args, **kwargs)) if isinstance(value, Tensor)]
    args, kwargs = inputs
    try:
        actual = program(*args, **kwargs)
    except Exception as error:  # onnxruntime's errors have no common type
        raise ExportError(
            f"onnxruntime cannot run the file ({first_line(error)}): it is not written. Choose an older opset, or "
            "check=False"
        ) from error
    if len(actual) != len(expected):
        raise ExportError(f"the file has {len(actual)} outputs, the model {len(expected)}")
    found = max([0.0, *map(_relative, actual, expected)])
    _logger.info("apex_npu: largest difference of the ONNX file from the model: %.2g", found)
    if not found <= TOLERANCES[dtype]:
        raise ExportError(
            f"the results of the file in onnxruntime differ from the model's by {found:.2g} of the largest "
            f"magnitude, more than {TOLERANCES[dtype]:g}: it is not written. If the results of the model are "
            f"random, or not that precise in {str(dtype).removeprefix('torch.')}, pass check=False"
        )
    return found


def _relative(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest magnitude; 0 for integers, inf if only one value is finite."""
    if not expected.is_floating_point():
        return 0.0
    actual, expected = actual.double(), expected.double()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    difference = (actual - expected).abs()[~same].max()
    return float(
        (difference / expected[expected.isfinite()].abs().max()).nan_to_num(nan=float("inf"), posinf=float("inf"))
    )
