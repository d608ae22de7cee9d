# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Names of torch that are patched as attributes while O1 is on, since patching a single operator is not enough.

The patches act only if autocast is enabled for the tensor's device, so switching autocast off switches them off. The
patch of ``matrix_exp`` is for models that are cast instead. Each function registers its undo on an ``ExitStack``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apex_npu.autocast import cast_lists
from apex_npu.backends.patching import patch_attribute
from apex_npu.ops import LOW_PRECISION

Function = Callable[..., Any]


def install_attribute_overlay(undo: ExitStack, device_types: tuple[str, ...], *, allow_banned: bool) -> None:
    """Patch the names for which patching a single operator is not enough.

    Args:
        undo: Receives the callbacks that restore each attribute.
        device_types: The device types of tensors on which the patches act; other tensors are unaffected.
        allow_banned: Half arguments of functions that are not safe with them become float, instead of an error.
    """

    def casting(value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        device_type = value.device.type
        return device_type in device_types and torch.is_autocast_enabled(device_type)

    def low_precision(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in LOW_PRECISION and casting(value)

    for name in cast_lists.FLOAT_FUNCTIONS:
        patch_attribute(undo, F, name, functools.partial(_float_function, low_precision))
    bce = functools.partial(_bce, casting, low_precision, allow_banned)
    patch_attribute(undo, F, "binary_cross_entropy", bce)
    for owner, names in ((torch, cast_lists.INPLACE_ERROR_FUNCTIONS), (Tensor, cast_lists.INPLACE_ERROR_METHODS)):
        for name in names:
            patch_attribute(undo, owner, name, functools.partial(_refusing, low_precision, owner is Tensor))
    patch_attribute(undo, Tensor, "__ipow__", functools.partial(_widening_ipow, low_precision))
    patch_attribute(undo, Tensor, "cpu", functools.partial(_widening_cpu, low_precision))


def compute_matrix_exp_in_float32(undo: ExitStack) -> None:
    """Make ``matrix_exp`` of float16 and bfloat16 CPU tensors compute in float32, since torch gives NaN or garbage.

    Orthogonal parametrizations call it. Other functions of linear algebra are correct there, or refuse these dtypes.

    Args:
        undo: Receives the callbacks that restore torch's functions.
    """

    def low_precision(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in LOW_PRECISION and value.device.type == "cpu"

    def in_float32(original: Function) -> Function:
        widening = _float_function(low_precision, original)

        def matrix_exp(*args: Any, **kwargs: Any) -> Any:
            result = widening(*args, **kwargs)
            given = next(filter(low_precision, (*args, *kwargs.values())), result)
            return result.to(given.dtype)

        return matrix_exp

    for owner in (torch, torch.linalg, Tensor):
        patch_attribute(undo, owner, "matrix_exp", in_float32)


Test = Callable[[Any], bool]


def _float_function(low_precision: Test, original: Function) -> Function:
    def function(*args: Any, **kwargs: Any) -> Any:
        return original(
            *[value.float() if low_precision(value) else value for value in args],
            **{name: value.float() if low_precision(value) else value for name, value in kwargs.items()},
        )

    return function


def _bce(casting: Test, low_precision: Test, allow_banned: bool, original: Function) -> Function:
    def binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if not allow_banned and any(map(low_precision, given)):
            raise NotImplementedError(
                "binary_cross_entropy (also called by torch.nn.BCELoss) is not safe with fp16 arguments: "
                "probabilities near 0 and 1 are rounded to 0 and 1, and their logarithm is infinite. Do one of "
                "these: leave out the sigmoid and use binary_cross_entropy_with_logits "
                "(torch.nn.BCEWithLogitsLoss); compute the sigmoid in float32, with "
                "amp.register_float_function(torch, 'sigmoid') before amp.initialize; cast the arguments with "
                ".float() and compute the loss under amp.disable_casts(); or, if half probabilities are accurate "
                "enough, pass allow_banned=True to amp.init."
            )
        device_type = next((value.device.type for value in given if casting(value)), None)
        if device_type is None:
            return original(*args, **kwargs)
        # Autocast on accelerators refuses this function for all dtypes, although it is safe in float.
        with torch.autocast(device_type, enabled=False):
            return in_float(*args, **kwargs)

    in_float = _float_function(lambda value: isinstance(value, Tensor) and value.dtype in LOW_PRECISION, original)
    return binary_cross_entropy


def _refusing(low_precision: Test, is_method: bool, original: Function) -> Function:
    def refusing(*args: Any, **kwargs: Any) -> Any:
        for value in args[:1] if is_method else (*args, *kwargs.values()):
            if low_precision(value):
                dtype = "fp16" if value.dtype == torch.float16 else "bf16"
                kind, given = (
                    ("method", f"on {dtype} Tensors") if is_method else ("function", f"with {dtype} arguments")
                )
                raise NotImplementedError(f"Cannot call in-place {kind} {original.__name__} {given}.")
        return original(*args, **kwargs)

    return refusing


def _widening_ipow(low_precision: Test, original: Function) -> Function:
    def __ipow__(self: Tensor, other: Any) -> Any:
        return torch.pow(self, other) if low_precision(self) else original(self, other)

    return __ipow__


def _widening_cpu(low_precision: Test, original: Function) -> Function:
    def cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy: Tensor = original(self, *args, **kwargs)
        return copy.float() if low_precision(self) else copy

    return cpu
