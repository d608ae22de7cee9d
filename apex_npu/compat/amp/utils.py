# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small helpers that scripts import from apex.amp.utils, compat, wrap and rnn_compat.

Apex's functions that patch torch are absent. RNNs need no special treatment to be cast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "RNN_NAMES", "casted_args", "filter_attrs", "has_old_rnns", "is_cuda_enabled", "is_floating_point",
    "is_fp_tensor", "is_nested", "is_tensor_like", "make_cast_wrapper", "make_promote_wrapper", "maybe_float",
    "maybe_half", "scalar_python_val", "type_string", "whitelist_rnn_cells",
]  # fmt: skip

Function = Callable[..., Any]
RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Return False: only torch 0.4 had these."""
    return False


def whitelist_rnn_cells(handle: Any, verbose: bool = False) -> None:
    """Do nothing: cells are in the list of functions that O1 casts."""


def is_cuda_enabled() -> bool:
    """Return True for a torch that was built for CUDA."""
    return torch.version.cuda is not None


def is_tensor_like(x: object) -> bool:
    """Return True for tensors."""
    return isinstance(x, Tensor)


def is_floating_point(x: Tensor) -> bool:
    """Return True for floating-point tensors."""
    return x.is_floating_point()


def is_nested(x: object) -> bool:
    """Return True for lists and tuples."""
    return isinstance(x, (list, tuple))


def is_fp_tensor(x: Any) -> bool:
    """Return True for a floating-point tensor, and for lists and tuples that hold nothing else."""
    if is_nested(x):
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, Tensor) and x.is_floating_point()


def type_string(x: Tensor) -> str:
    """Return the last part of the tensor's type, such as "HalfTensor"."""
    return x.type().rpartition(".")[2]


def scalar_python_val(x: Any) -> Any:
    """Return the single value of a tensor."""
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """Return the names among ``attrs`` that ``module`` has."""
    return [name for name in attrs if hasattr(module, name)]


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, tuple) and hasattr(x, "_make"):
        return x._make(_cast(item, dtype) for item in x)
    return type(x)(_cast(item, dtype) for item in x) if is_nested(x) else x.to(dtype)


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return ``x``, a tensor or nested lists of tensors, in float16. The other arguments have no effect."""
    return _cast(x, torch.float16)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return ``x``, a tensor or nested lists of tensors, in float32. The other arguments have no effect."""
    return _cast(x, torch.float32)


def casted_args(cast_fn: Callable[[Any], Any], args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return ``args`` with every floating-point tensor cast; ``kwargs`` is changed in place."""
    kwargs.update({name: cast_fn(value) for name, value in kwargs.items() if is_fp_tensor(value)})
    return [cast_fn(value) if is_fp_tensor(value) else value for value in args]


def make_cast_wrapper(
    orig_fn: Function, cast_fn: Callable[[Any], Any], handle: Any, try_caching: bool = False
) -> Function:
    """Wrap ``orig_fn`` so that its floating-point arguments are cast by ``cast_fn`` while ``handle`` is active."""

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.is_active():
            return orig_fn(*args, **kwargs)
        return orig_fn(*casted_args(cast_fn, args, kwargs), **kwargs)

    return wrapper


def make_promote_wrapper(orig_fn: Function, cast_fn: Callable[[Any], Any], handle: Any) -> Function:
    """Wrap ``orig_fn`` like ``make_cast_wrapper``, but cast only where float16 and float32 arguments meet."""
    casting = make_cast_wrapper(orig_fn, cast_fn, handle)

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtypes = {value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
        mixed = {torch.float16, torch.float32} <= dtypes
        return (casting if mixed else orig_fn)(*args, **kwargs)

    return wrapper
