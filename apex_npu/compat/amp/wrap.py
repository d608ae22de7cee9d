# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Wrappers that cast a function's arguments while a handle is active. Apex's functions that patch torch are absent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_npu.compat.amp.handle import AmpHandle
from apex_npu.compat.amp.utils import casted_args

__all__ = ["make_cast_wrapper", "make_promote_wrapper"]

Function = Callable[..., Any]


def make_cast_wrapper(
    orig_fn: Function, cast_fn: Callable[[Any], Any], handle: AmpHandle, try_caching: bool = False
) -> Function:
    """Wrap ``orig_fn`` so that its floating-point arguments are cast by ``cast_fn`` while ``handle`` is active."""

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.is_active():
            return orig_fn(*args, **kwargs)
        return orig_fn(*casted_args(cast_fn, args, kwargs), **kwargs)

    return wrapper


def make_promote_wrapper(orig_fn: Function, cast_fn: Callable[[Any], Any], handle: AmpHandle) -> Function:
    """Wrap ``orig_fn`` like ``make_cast_wrapper``, but cast only where float16 and float32 arguments meet."""
    casting = make_cast_wrapper(orig_fn, cast_fn, handle)

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtypes = {value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
        mixed = {torch.float16, torch.float32} <= dtypes
        return (casting if mixed else orig_fn)(*args, **kwargs)

    return wrapper
