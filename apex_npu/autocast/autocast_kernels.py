# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The overlay's kernels in Python, used if the extension has not been built: ``make_kernel(policy, ...)``.

They do the same as csrc/amp/overlay.cpp, except that they keep no copies of weights. A call costs 10 to 30 µs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_npu.autocast import cast_lists
from apex_npu.ops import LOW_PRECISION

Kernel = Callable[..., Any]


def make_kernel(policy: str, op: Kernel, device_type: str) -> Kernel:
    """Make a kernel for autocast's dispatch key that casts the arguments of ``op`` and calls it with autocast off.

    Args:
        policy: The name of a policy in ``cast_lists.policies``.
        op: The operator.
        device_type: The device type of the autocast that the kernel is for.
    """
    return _FACTORIES[policy](op, device_type)


def _to_float(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW_PRECISION else value
    if isinstance(value, (list, tuple)):
        return [_to_float(item) for item in value]
    return value


def _to_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in cast_lists.AUTOCAST_FLOATS else value
    if isinstance(value, (list, tuple)):
        return [_to_dtype(item, dtype) for item in value]
    return value


# ------------------------------------------------------------------------------------------------------------- kernels
# A kernel is called only while autocast is enabled for its device type, hence the plain True in each finally.
# Switching the flag is the cheapest way to leave autocast (an _ExcludeDispatchKeyGuard costs 0.6 us more, a redispatch
# 0.3 us). It also keeps an operator made of others, such as layer_norm or lstm, in one precision throughout.


def _float_kernel(op: Kernel, device_type: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if kwargs.get("dtype") is not None:
                return without_casts(*args, **kwargs)  # an explicit dtype takes precedence
            kwargs = {name: _to_float(value) for name, value in kwargs.items()}
        torch.set_autocast_enabled(device_type, False)
        try:
            return op(*[_to_float(value) for value in args], **kwargs)
        finally:
            torch.set_autocast_enabled(device_type, True)

    without_casts = _uncast_kernel(op, device_type)
    return kernel


def _uncast_kernel(op: Kernel, device_type: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        torch.set_autocast_enabled(device_type, False)
        try:
            return op(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device_type, True)

    return kernel


def _cast_all_kernel(op: Kernel, device_type: str, choose: Callable[[tuple[Any, ...]], torch.dtype]) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose(args)
        torch.set_autocast_enabled(device_type, False)
        try:
            return op(
                *[_to_dtype(value, dtype) for value in args],
                **{name: _to_dtype(value, dtype) for name, value in kwargs.items()},
            )
        finally:
            torch.set_autocast_enabled(device_type, True)

    return kernel


def _half_kernel(op: Kernel, device_type: str) -> Kernel:
    # The current dtype, not the policy's: a user's own bfloat16 block inside O1 casts to bfloat16.
    return _cast_all_kernel(op, device_type, lambda args: torch.get_autocast_dtype(device_type))


def _promote_kernel(op: Kernel, device_type: str) -> Kernel:
    def widest(args: tuple[Any, ...]) -> torch.dtype:
        dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor) and arg.dtype in cast_lists.AUTOCAST_FLOATS}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    return _cast_all_kernel(op, device_type, widest)


def _match_self_kernel(op: Kernel, device_type: str) -> Kernel:
    casting = _cast_all_kernel(op, device_type, lambda args: args[0].dtype)
    plain = _uncast_kernel(op, device_type)

    def kernel(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        # For an integer tensor nothing is cast, so that torch rejects floats.
        return (casting if self.dtype in cast_lists.AUTOCAST_FLOATS else plain)(self, *args, **kwargs)

    return kernel


_FACTORIES: dict[str, Callable[[Kernel, str], Kernel]] = {
    "half": _half_kernel,
    "float": _float_kernel,
    "promote": _promote_kernel,
    "match_self": _match_self_kernel,
}
