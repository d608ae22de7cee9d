# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks of hyper-parameters: one wording for all optimizers. NaN never passes."""

from __future__ import annotations

import numbers
from typing import Any

from torch import Tensor


def as_number(name: str, value: Any) -> float:
    """``value`` as a float.

    Raises:
        TypeError: It is neither a real number nor a tensor.
        ValueError: It is a tensor of more than one element.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        return float(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return float(value)


def check_non_negative(label: str, name: str, value: Any) -> None:
    """Require 0 <= value < inf; the error begins as torch's does: "Invalid learning rate: -1.0".

    Raises:
        ValueError: It is negative, infinite or NaN.
        TypeError: It is no number.
    """
    if not 0.0 <= as_number(name, value) < float("inf"):
        raise ValueError(f"Invalid {label}: {value} ({name} must be finite and >= 0)")


def check_unit_interval(label: str, name: str, value: Any) -> None:
    """Require a number in [0, 1].

    Raises:
        ValueError: It is outside, or NaN.
        TypeError: It is no number.
    """
    if not 0.0 <= as_number(name, value) <= 1.0:
        raise ValueError(f"Invalid {label}: {value} ({name} must be in [0, 1])")


def check_half_open_interval(label: str, name: str, value: Any) -> None:
    """Require a number in [0, 1).

    Raises:
        ValueError: It is outside, or NaN.
        TypeError: It is no number.
    """
    if not 0.0 <= as_number(name, value) < 1.0:
        raise ValueError(f"Invalid {label}: {value} ({name} must be in [0, 1))")


def check_betas(betas: Any) -> None:
    """Require two numbers in [0, 1).

    Raises:
        ValueError: One is outside.
        TypeError: They are not two numbers.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        check_half_open_interval(f"beta parameter at index {i}", f"betas[{i}]", beta)


def check_no_amsgrad(optimizer: str, amsgrad: Any) -> None:
    """Refuse AMSGrad, as NVIDIA's optimizers do.

    Raises:
        RuntimeError: It is asked for.
    """
    if amsgrad:
        raise RuntimeError(f"{optimizer} does not support the AMSGrad variant; use NpuFusedAdam(amsgrad=True)")


def check_bool(name: str, value: Any) -> None:
    """Require True or False.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
